"""Check that this MuJoCo gives LIBERO's physics, in one scene that is known to fail in other
versions.
"""

import os
from typing import NamedTuple

import numpy as np

from vla_rl.envs.libero.assets import find_assets
from vla_rl.envs.libero.env import IDLE_ACTION
from vla_rl.envs.libero.scene import Scene
from vla_rl.envs.libero.task_files import read_init_states
from vla_rl.envs.libero.tasks import find_task
from vla_rl.errors import EnvError

_SUITE, _TASK_ID = "libero_spatial", 5
_SETTLE_STEPS = 30
# From MuJoCo 3.4.0 on the bowl slides off the ramekin: success rates then are some points off,
# without an error.
_MAX_OFFSET_M, _MIN_HEIGHT_M, _MAX_SPEED = 0.03, 0.02, 0.05


class Resting(NamedTuple):
    """Pose of the bowl of libero_spatial task 5 at rest, relative to the ramekin below it.

    Example:
        Resting(offset_m=0.0, height_m=0.0332, speed=0.000114)
    """

    offset_m: float
    """Horizontal distance of the two origins (m)."""

    height_m: float
    """Height of the bowl's origin above the ramekin's (m)."""

    speed: float
    """Largest component of the bowl's velocity (m/s and rad/s)."""


def probe_physics(assets: str | os.PathLike[str] | None = None, init_state_id: int = 0) -> Resting:
    """Let the bowl, which starts some 11 cm above the ramekin, fall and settle for 1.5 s.

    Raises: `EnvError` if it does not rest on the ramekin, because results would not be comparable
    with published ones.
    """
    task = find_task(_SUITE, _TASK_ID)
    scene = Scene(task, find_assets(assets).path, scene_seed=0)
    try:
        scene.start_episode(read_init_states(task.init_states_file)[init_state_id])
        for _ in range(_SETTLE_STEPS):
            scene.run_control_step(np.array(IDLE_ACTION))
        bowl, ramekin = (
            scene.domain.obj_body_id[name]
            for name in ("akita_black_bowl_1", "glazed_rim_porcelain_ramekin_1")
        )
        apart = scene.data.xpos[bowl] - scene.data.xpos[ramekin]
        velocity = scene.data.cvel[bowl]
        resting = Resting(
            float(np.hypot(apart[0], apart[1])), float(apart[2]), float(np.abs(velocity).max())
        )
    finally:
        scene.close()
    if (
        resting.offset_m > _MAX_OFFSET_M
        or resting.height_m < _MIN_HEIGHT_M
        or resting.speed > _MAX_SPEED
    ):
        raise EnvError(
            f"the bowl of {task.key} does not rest on the ramekin ({resting}); the physics of "
            "this MuJoCo or these assets "
            'differ from those of published results. Run `pip install "mujoco>=3.3.0,<3.3.3"` and '
            "use LIBERO's own assets."
        )
    return resting
