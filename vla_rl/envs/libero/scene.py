"""One task's scene: built once, restored to any start in a millisecond, stepped by our own loop.

robosuite rebuilds the whole model at each reset, and its controller, gripper and sensor timers hold
state that no initial state covers. Here the scene is built once; all state that a step can change
is copied after each of LIBERO's resets (`SeededResets`), and each episode starts from such a copy.
So an episode depends only on (task, scene seed, number of the reset, initial state, actions), not
on the process or on earlier episodes.

robosuite's sensors read the simulation shortly before the end of a control step, at the last but
one of its 25 substeps, and the poses of bodies are those before that substep moved them.
`Scene.reading` holds that instant; images are drawn from it afterwards, if needed.

A process that forks others prepares its scenes first. Each child then finds them built, in
copy-on-write memory that it shares with its siblings, and makes only its own cameras. Those of a
prepared scene wait for the next environment too, because a simulator of a training run changes
between its tasks every few episodes, and uploading meshes and textures takes as long as drawing
thirty pairs of small images. Other scenes are freed with their environment.
"""

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, get_args

import msgspec
import numpy as np

from vla_rl.envs.libero.building import SeededResets, draw_start, unreadable_goal
from vla_rl.envs.libero.loading import load_simulator
from vla_rl.envs.libero.stepping import Physics, Stepper
from vla_rl.envs.libero.task_files import read_init_states
from vla_rl.envs.libero.tasks import Task
from vla_rl.envs.mujoco.cameras import DRAWN_FIELDS, Cameras
from vla_rl.envs.mujoco.drawing_quality import Quality
from vla_rl.errors import EnvError


class SensorReading(msgspec.Struct, frozen=True):
    """Values of robosuite's sensors at one instant."""

    proprio: np.ndarray
    """float32 [8]: gripper site position (m, world), hand orientation (axis-angle, rad, world), two
    finger joints (m)."""

    drawn: Mapping[str, np.ndarray]
    """Input of an image: the arrays of `DRAWN_FIELDS` and `site_rgba` (a lit burner is a site), by
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
        self._resets.run_next_reset()
        self._check_goal(task)
        self._stepper = Stepper(self._env)
        # force sensors that are never read
        self.model.opt.disableflags |= self._mujoco.mjtDisableBit.mjDSBL_SENSOR
        self._matrices = {
            "exact": self.model.opt.jacobian,
            # Sparse matrices are cheaper where many loose things lie about, as in libero_object,
            # and give the same results.
            "fast": int(self._mujoco.mjtJacobian.mjJAC_SPARSE),
        }
        self._physics: Physics = "exact"
        # An episode starts from a copy in 0.3 ms, where a reset of robosuite's takes 0.3 to 0.9 s.
        self._after_resets = [self.get_state()]

    @property
    def physics(self) -> Physics:
        """Arithmetic of `run_control_step`; may be set at any time.

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
    def reading(self) -> SensorReading:
        """The sensors' last values."""
        read = self._stepper.last_poses
        drawn = {name: getattr(read, name) for name in (*DRAWN_FIELDS, "site_rgba")}
        return SensorReading(self._stepper.proprio, drawn)

    def start_episode(self, init_state: np.ndarray, reset_number: int = 0) -> None:
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
        # All state, not the joints alone: gripper, goal orientation, warm start and the sensors'
        # clock are not in LIBERO's initial states, and would come from the episode before.
        self._restore(self._after_reset(reset_number))
        data.time = init_state[0]
        data.qpos[:] = init_state[1 : 1 + model.nq]
        data.qvel[:] = init_state[1 + model.nq :]
        self._look_around()

    def start_drawn_episode(self, seed: int) -> None:
        """Put the scene to a start that is drawn from `seed`, including fixtures:
        `drawn_starts`.
        """
        self._restore(self._after_reset(0))
        draw_start(self._env, seed)
        self._look_around()

    def run_control_step(self, action: np.ndarray) -> bool:
        """Run one control step of 50 ms with float64 [7].

        Return whether the goal holds after it.
        """
        self._stepper.run_control_step(action, self._physics)
        return self._is_goal_reached()

    def holds(self, predicate: Sequence[str]) -> bool:
        """Return whether a predicate holds now, such as ["on", "plate_1", "flat_stove_1_cook_region"].

        LIBERO's own code evaluates it. Raises: KeyError for a name that is not in the scene.
        """
        return bool(self._env._eval_predicate(list(predicate)))

    def find_fault(self, predicate: Sequence[str]) -> Exception | None:
        """Return what LIBERO's code raises for a predicate, now or in a later step; None if it can be evaluated."""
        try:
            self.holds(predicate)
            last = self._env.get_object(predicate[-1])
            # LIBERO asks a thing for its inside only once something touches it, and things have none.
            if predicate[0] == "in":
                last.in_box  # noqa: B018
            # What has no joint would be shut, and neither open nor on, for ever.
            if len(predicate) == 2:
                last.joints[0]
        except Exception as error:  # LIBERO's own code raises whatever it meets
            return error
        return None

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
            # Resets are robosuite's in either physics, so that fast and exact episodes start alike.
            physics, self.physics = self.physics, "exact"
            while number >= len(self._after_resets):
                self._resets.run_next_reset()
                self._stepper.copy_reset_state(self._env)
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
        self._stepper.read_sensors()

    def _check_goal(self, task: Task) -> None:
        """Check each predicate of the goal. Raises: `ValueError` naming one that LIBERO cannot evaluate, such
        as whether a plate is open.
        """
        for state in self._env.parsed_problem["goal_state"]:
            if (error := self.find_fault(state)) is not None:
                what = f"the predicate ({' '.join(state)}) cannot be evaluated"
                raise unreadable_goal(task, error, what) from error

    def _is_goal_reached(self) -> bool:
        """Evaluate the goal and update the burners' lights, as robosuite does after each control
        step.
        """
        is_reached = bool(self._env._check_success())
        self._env._post_process()
        return is_reached


_MAX_UPLOADED_BYTES: Final = 256 * 2**20
"""Bytes of meshes and textures that the waiting cameras of a process may hold: those of some ten
tasks with images of 84 pixels, or of one or two with whole textures of 4096."""


class SceneKey(NamedTuple):
    """Arguments that identify a scene."""

    task: Task
    assets: Path
    scene_seed: int


class CameraKey(NamedTuple):
    """Everything that decides whether cameras of a scene can serve another environment of it."""

    cameras: tuple[str, ...]
    size: int
    quality: Quality
    thread: int
    """Id of the thread that made them: OpenGL may refuse another one."""

    @classmethod
    def of_this_thread(cls, cameras: tuple[str, ...], size: int, quality: Quality) -> "CameraKey":
        """Return the key of cameras that this thread uses."""
        return cls(cameras, size, quality, threading.get_ident())


_prepared: dict[SceneKey, Scene] = {}
_in_use: set[SceneKey] = set()
_spare_cameras: dict[SceneKey, tuple[CameraKey, Cameras]] = {}
"""Cameras of prepared scenes that no environment uses, the longest waiting first."""


def prepare_scene(key: SceneKey) -> Scene:
    """Build the scene and keep it for the life of this process; a second call returns the same.

    The scene also runs its first steps here, so that the compiled code is loaded before a fork.
    """
    if key in _prepared:
        return _prepared[key]
    scene = Scene(*key)
    scene.start_episode(read_init_states(key.task.init_states_file)[0])
    # On a new machine the first step compiles for half a minute of CPU: once here, instead of in
    # each fork.
    for physics in get_args(Physics):
        scene.physics = physics
        scene.run_control_step(np.zeros(7))
    _prepared[key] = scene
    return scene


def take_scene(key: SceneKey) -> Scene:
    """Return the prepared scene if there is one that is not in use; else build a new one."""
    if key in _prepared and key not in _in_use:
        _in_use.add(key)
        return _prepared[key]
    return Scene(*key)


def take_cameras(key: SceneKey, scene: Scene, drawing: CameraKey) -> Cameras | None:
    """Return the waiting cameras of this scene if they draw the same; others are closed."""
    if _prepared.get(key) is not scene or key not in _spare_cameras:
        return None
    found, cameras = _spare_cameras.pop(key)
    if found != drawing:
        cameras.close()
        return None
    cameras.resume_look()
    return cameras


def release_cameras(key: SceneKey, scene: Scene, drawing: CameraKey, cameras: Cameras) -> None:
    """Return the cameras of a scene: those of a prepared one wait if there is room, others are closed."""
    if (
        _prepared.get(key) is not scene
        or cameras.is_lost
        or cameras.num_bytes > _MAX_UPLOADED_BYTES
    ):
        cameras.close()
        return
    cameras.suspend_look()
    _spare_cameras[key] = drawing, cameras
    while sum(each.num_bytes for _, each in _spare_cameras.values()) > _MAX_UPLOADED_BYTES:
        _spare_cameras.pop(next(iter(_spare_cameras)))[1].close()


def release_scene(key: SceneKey, scene: Scene) -> None:
    """Return a scene from `take_scene`: a prepared one waits for the next environment, any other is
    freed.
    """
    if _prepared.get(key) is scene:
        _in_use.discard(key)
    else:
        scene.close()
