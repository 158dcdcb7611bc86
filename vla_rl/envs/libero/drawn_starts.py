"""Additional starts: robot, objects and fixtures are placed anew in the regions of the task's goal
file.

LIBERO's fixed initial states hardly vary (the target of some tasks never moves). LIBERO's own
samplers draw these as in its reset, but on an existing scene: the same seed gives the same start,
whatever ran before.
"""

from typing import Any, Final

import numpy as np

from vla_rl.envs.libero.building import retry_placement, seeded
from vla_rl.envs.libero.simulator import load_simulator

JOINT_NOISE_RAD: Final = 0.02
"""Standard deviation of each of the arm's joints, as in LIBERO's fixed initial states; its own
reset has none."""


def place_anew(env: Any, seed: int) -> None:
    """Draw a start of robosuite's `env` from `seed` and write it into the simulation; poses are not
    computed.

    Raises: EnvError if the objects find no place.
    """
    data = env.sim.data._data
    with seeded(seed):
        for robot in env.robots:
            noise = np.random.randn(len(robot.init_qpos)) * JOINT_NOISE_RAD
            data.qpos[robot._ref_joint_pos_indexes] = robot.init_qpos + noise
        for joint in env.object_property_initializers:  # doors, drawers and knobs
            env.object_states_dict[joint.name].set_joint(joint.sample())
        # things on a fixture need the fixture's pose
        load_simulator().mujoco.mj_step1(env.sim.model._model, data)
        placements = retry_placement(lambda: _sampled(env))
    for position, orientation, item in placements.values():
        if item.name in env.fixtures_dict:
            body = env.sim.model.body_name2id(item.root_body)
            env.sim.model.body_pos[body], env.sim.model.body_quat[body] = position, orientation
        else:
            env.sim.data.set_joint_qpos(item.joints[-1], np.concatenate([position, orientation]))
    data.qvel[:] = 0.0


def _sampled(env: Any) -> dict[str, Any]:
    placements = env.placement_initializer.sample()
    placements = env.conditional_placement_initializer.sample(env.sim, placements)
    found: dict[str, Any] = env.conditional_placement_on_objects_initializer.sample(placements)
    return found
