"""One task's scene without cameras: built once, restored to any start in a millisecond, stepped by
our own loop.

robosuite rebuilds the whole model at each reset, and its controller, gripper and sensor timers hold
state that no initial state covers. Here the scene is built once; all state that a step can change
is copied after each of LIBERO's resets (`SeededResets`), and each episode starts from such a copy.
So an episode depends only on (task, scene seed, number of the reset, initial state, actions), not
on the process or on earlier episodes.

robosuite's sensors read the simulation shortly before the end of a control step, at the last but
one of its 25 substeps, and the poses of bodies are those before that substep moved them.
`Scene.sample` holds that instant; pictures are drawn from it afterwards, if needed.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from vla_rl.envs.libero.building import SeededResets, unreadable_goal
from vla_rl.envs.libero.drawn_starts import place_anew
from vla_rl.envs.libero.simulator import load_simulator
from vla_rl.envs.libero.stepping import Physics, Stepper
from vla_rl.envs.libero.tasks import Task
from vla_rl.envs.mujoco.cameras import DRAWN_FIELDS
from vla_rl.errors import EnvError


class Sample(msgspec.Struct, frozen=True):
    """Values of robosuite's sensors at one instant."""

    proprio: np.ndarray
    """float32 [8]: gripper site position (m, world), hand orientation (axis-angle, rad, world), two
    finger joints (m)."""

    drawn: Mapping[str, np.ndarray]
    """Input of a picture: the arrays of `DRAWN_FIELDS` and `site_rgba` (a lit burner is a site), by
    name. Overwritten by the next step.
    """


class Scene:
    """The simulated scene of one task.

    Args:
        task: the task.
        assets: LIBERO's asset folder.
        scene_seed: seed of the poses of cabinets, stoves and racks, which the initial states do not
            contain.

    Raises: `FileNotFoundError` naming a missing asset or goal file; `ValueError` naming a goal file
        that LIBERO cannot read; `EnvError` if the objects find no place.
    """

    def __init__(self, task: Task, assets: Path, scene_seed: int) -> None:
        self._mujoco = load_simulator().mujoco
        self._resets = SeededResets(task, assets, scene_seed)
        self._env = self._resets.env
        self._resets.advance()
        self._check_goal(task)
        self._stepper = Stepper(self._env)
        # force sensors that are never read
        self.model.opt.disableflags |= self._mujoco.mjtDisableBit.mjDSBL_SENSOR
        self._matrices = {
            "exact": self.model.opt.jacobian,
            "fast": int(self._mujoco.mjtJacobian.mjJAC_SPARSE),
        }
        self._physics: Physics = "exact"
        self._after_resets = [self.get_state()]

    @property
    def physics(self) -> Physics:
        """Arithmetic of `advance`; may be set at any time.

        The fast one solves for contacts with sparse matrices.
        """
        return self._physics

    @physics.setter
    def physics(self, physics: Physics) -> None:
        self._physics, self.model.opt.jacobian = physics, self._matrices[physics]

    @property
    def model(self) -> Any:
        """MuJoCo's `MjModel`."""
        return self._env.sim.model._model

    @property
    def data(self) -> Any:
        """MuJoCo's `MjData`, live."""
        return self._env.sim.data._data

    @property
    def domain(self) -> Any:
        """robosuite's environment itself, for users of the hidden state (experts, the probe).

        Never stepped.
        """
        return self._env

    @property
    def sample(self) -> Sample:
        """The sensors' last values."""
        read = self._stepper.read
        drawn = {name: getattr(read, name) for name in (*DRAWN_FIELDS, "site_rgba")}
        return Sample(self._stepper.proprio, drawn)

    def begin(self, init_state: np.ndarray, reset_number: int = 0) -> None:
        """Restore the scene to the start of an episode.

        Args:
            init_state: float64 [1 + nq + nv], one of LIBERO's.
            reset_number: number of the LIBERO reset after the seed that placed the fixtures; 0 is
                the first.
        """
        model, data = self.model, self.data
        if init_state.shape != (1 + model.nq + model.nv,):
            raise EnvError(
                f"the initial state has {init_state.size} numbers, the model needs "
                f"{1 + model.nq + model.nv}; use the assets with which LIBERO's initial states "
                "were made."
            )
        self._restore(self._after_reset(reset_number))
        data.time = init_state[0]
        data.qpos[:] = init_state[1 : 1 + model.nq]
        data.qvel[:] = init_state[1 + model.nq :]
        self._look_around()

    def begin_drawn(self, seed: int) -> None:
        """Put the scene to a start that is drawn from `seed`, including fixtures:
        `drawn_starts`.
        """
        self._restore(self._after_reset(0))
        place_anew(self._env, seed)
        self._look_around()

    def advance(self, action: np.ndarray) -> bool:
        """Run one control step of 50 ms with float64 [7].

        Return whether the goal holds after it.
        """
        self._stepper.run(action, self._physics)
        return self._is_goal_reached()

    def get_state(self) -> dict[str, Any]:
        """Return all state that a later step depends on, as plain arrays and numbers."""
        model, every = self.model, self._mujoco.mjtState.mjSTATE_INTEGRATION
        physics = np.empty(self._mujoco.mj_stateSize(model, every))
        self._mujoco.mj_getState(model, self.data, physics, every)
        return {
            "physics": physics,
            "body_pos": model.body_pos.copy(),
            "body_quat": model.body_quat.copy(),
            "site_rgba": model.site_rgba.copy(),
            "stepper": self._stepper.get_state(),
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from a state that `get_state` returned for the same task, in this scene or
        another one.
        """
        self._restore(state)
        self._mujoco.mj_forward(self.model, self.data)
        # again, because computing poses and contacts has changed the solver's warm start
        self._restore(state)

    def close(self) -> None:
        """Free the simulation; a second call does nothing."""
        if self._env is not None:
            self._env.close()
            self._env = None

    def _after_reset(self, number: int) -> dict[str, Any]:
        """Return the state after LIBERO's reset with this number.

        Earlier resets are run too, each only once.
        """
        if number >= len(self._after_resets):
            physics, self.physics = self.physics, "exact"
            while number >= len(self._after_resets):
                self._resets.advance()
                self._stepper.begin_anew(self._env)
                self._after_resets.append(self.get_state())
            self.physics = physics
        return self._after_resets[number]

    def _restore(self, state: dict[str, Any]) -> None:
        """Write a state into the simulation.

        Values derived from it (poses, contacts) are not computed.
        """
        model = self.model
        model.body_pos[:] = state["body_pos"]
        model.body_quat[:] = state["body_quat"]
        model.site_rgba[:] = state["site_rgba"]
        physics = np.asarray(state["physics"], np.float64)
        self._mujoco.mj_setState(
            model, self.data, physics, self._mujoco.mjtState.mjSTATE_INTEGRATION
        )
        self._stepper.set_state(state["stepper"])

    def _look_around(self) -> None:
        """Compute derived values, update the burners' lights, and read the sensors."""
        self._mujoco.mj_forward(self.model, self.data)
        self._is_goal_reached()
        self._stepper.read_now()

    def _check_goal(self, task: Task) -> None:
        """Evaluate each predicate of the goal once. Raises: `ValueError` naming one that LIBERO cannot
        evaluate, such as whether a plate is open.
        """
        for state in self._env.parsed_problem["goal_state"]:
            try:
                self._env._eval_predicate(state)
            except Exception as error:  # LIBERO's own code, which raises whatever it meets
                what = f"the predicate ({' '.join(state)}) cannot be evaluated"
                raise unreadable_goal(task, error, what) from error

    def _is_goal_reached(self) -> bool:
        """Evaluate the goal and update the burners' lights, as robosuite does after each control
        step.
        """
        is_reached = bool(self._env._check_success())
        self._env._post_process()
        return is_reached
