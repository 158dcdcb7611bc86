"""One task's scene in robosuite, without cameras: built once, put back to any start in a millisecond, stepped exactly.

robosuite rebuilds the whole model at each reset and keeps state in its controller, its gripper and the timers of its
sensors that no initial state covers. Here the scene is built once, as LIBERO's evaluation does (`seed`, then `reset`);
everything that a step can change is copied at that moment, and each episode begins from that copy. So an episode is a
function of (task, scene seed, initial state, actions) alone, whatever was played before, in whatever process.

robosuite's sensors read the simulation shortly before the end of a control step, at the last but one of its 25
substeps, and the poses of bodies are those before that substep moved them. `Scene.sample` holds that instant; pictures
are drawn from it afterwards, if at all.
"""

import contextlib
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from vla_rl.envs.libero.assets import missing_asset
from vla_rl.envs.libero.simulator import load_simulator
from vla_rl.envs.libero.tasks import Task
from vla_rl.errors import EnvError

_PLACEMENT_ATTEMPTS = 50
_CLOCK = "robot0_eef_pos"
"""The one robosuite sensor that is kept: its timer says when all of them read."""

_CONTROLLER_FIELDS = (
    *("goal_pos", "goal_ori", "ee_pos", "ee_ori_mat", "ee_pos_vel", "ee_ori_vel", "joint_pos", "joint_vel"),
    *("J_pos", "J_ori", "J_full", "mass_matrix", "initial_joint"),
)


DRAWN_FIELDS = ("geom_xpos", "geom_xmat", "site_xpos", "site_xmat", "cam_xpos", "cam_xmat", "light_xpos", "light_xdir")
"""Arrays of `MjData` that MuJoCo draws from."""


class Sample(msgspec.Struct, frozen=True):
    """What robosuite's sensors read at one instant."""

    proprio: np.ndarray
    """float32 [8]: gripper site position (m, world), hand orientation (axis-angle, rad, world), two finger joints (m)."""

    drawn: Mapping[str, np.ndarray]
    """What a picture is made of: the arrays of `DRAWN_FIELDS` and `site_rgba` (a lit burner is a site), by name."""


class Scene:
    """The simulated scene of one task.

    Args:
        task: which task.
        assets: LIBERO's asset folder.
        scene_seed: fixes what the initial states leave open: where cabinets, stoves and racks stand.

    Raises: `FileNotFoundError` naming an asset that is missing; `EnvError` if the objects find no place.
    """

    def __init__(self, task: Task, assets: Path, scene_seed: int) -> None:
        self._simulator = load_simulator()
        self._env = self._build(task, assets, scene_seed)
        self._robot = self._env.robots[0]
        self._clock = self._env._observables[_CLOCK]
        self._clock.set_sensor(self._make_sensor())
        self._env._observables = OrderedDict({_CLOCK: self._clock})
        self._pristine = self.get_state()

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
        """robosuite's environment itself, for whoever may see the hidden state (the scripted expert, the probe)."""
        return self._env

    @property
    def sample(self) -> Sample:
        """What the sensors read last."""
        reading = self._clock.obs
        proprio = np.concatenate([reading[:3], axis_angle(reading[3:7]), reading[7:9]]).astype(np.float32)
        drawn, start = {}, 9
        for name, live in self._drawn_arrays():
            drawn[name] = reading[start : start + live.size].reshape(live.shape)
            start += live.size
        return Sample(proprio, drawn)

    def begin(self, init_state: np.ndarray) -> None:
        """Put everything to the start of an episode; `init_state` is float64 [1 + nq + nv], one of LIBERO's."""
        if init_state.shape != (1 + self.model.nq + self.model.nv,):
            raise EnvError(
                f"the initial state has {init_state.size} numbers, the model needs {1 + self.model.nq + self.model.nv}; "
                "the assets are not those that LIBERO's initial states were made with."
            )
        self.set_state(self._pristine)
        env = self._env
        env.sim.set_state_from_flattened(init_state)
        env.sim.forward()
        env._check_success()
        env._post_process()
        env._update_observables(force=True)

    def advance(self, action: np.ndarray) -> bool:
        """Run one control step of 50 ms with float64 [7]; True where the goal holds after it."""
        return bool(self._env.step(action)[2])

    def get_state(self) -> dict[str, Any]:
        """Everything that a later step depends on, as plain arrays and numbers."""
        env, model, data, mujoco = self._env, self.model, self.data, self._simulator.mujoco
        physics = np.empty(mujoco.mj_stateSize(model, mujoco.mjtState.mjSTATE_INTEGRATION))
        mujoco.mj_getState(model, data, physics, mujoco.mjtState.mjSTATE_INTEGRATION)
        controller = self._robot.controller
        return {
            "physics": physics,
            "body_pos": model.body_pos.copy(),
            "body_quat": model.body_quat.copy(),
            "site_rgba": model.site_rgba.copy(),
            "controller": {name: np.array(getattr(controller, name)) for name in _CONTROLLER_FIELDS},
            "controller_is_stale": bool(controller.new_update),
            "gripper": np.array(self._robot.gripper.current_action),
            "clock_s": float(self._clock._time_since_last_sample),
            "clock_has_sampled": bool(self._clock._sampled),
            "reading": np.array(self._clock._current_observed_value),
            "num_control_steps": int(env.timestep),
            "time_s": float(env.cur_time),
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on from a state that `get_state` gave for the same task, in this scene or in another one."""
        env, model, data, mujoco = self._env, self.model, self.data, self._simulator.mujoco
        model.body_pos[:] = state["body_pos"]
        model.body_quat[:] = state["body_quat"]
        model.site_rgba[:] = state["site_rgba"]
        physics = np.array(state["physics"], np.float64)
        mujoco.mj_setState(model, data, physics, mujoco.mjtState.mjSTATE_INTEGRATION)
        mujoco.mj_forward(model, data)
        # once more: computing poses and contacts has changed the solver's warm start, which is part of the state
        mujoco.mj_setState(model, data, physics, mujoco.mjtState.mjSTATE_INTEGRATION)
        controller = self._robot.controller
        for name in _CONTROLLER_FIELDS:
            fresh = np.empty_like(getattr(controller, name))  # keeps the memory order, on which rounding depends
            fresh[...] = state["controller"][name]
            setattr(controller, name, fresh)
        controller.new_update = state["controller_is_stale"]
        self._robot.gripper.current_action = np.array(state["gripper"])
        self._clock._time_since_last_sample = state["clock_s"]
        self._clock._sampled = state["clock_has_sampled"]
        self._clock._current_observed_value = np.array(state["reading"])
        env.timestep, env.cur_time = state["num_control_steps"], state["time_s"]

    def close(self) -> None:
        """Free the simulation; a second call does nothing."""
        if self._env is not None:
            self._env.close()
            self._env = None

    def _drawn_arrays(self) -> Iterator[tuple[str, np.ndarray]]:
        for name in DRAWN_FIELDS:
            yield name, getattr(self.data, name)
        yield "site_rgba", self.model.site_rgba

    def _make_sensor(self) -> Callable[[dict[str, Any]], np.ndarray]:
        """A robosuite sensor that reads, as one vector, the hand and everything that can be seen."""
        data, robot = self._env.sim.data, self._robot
        fingers = list(robot._ref_gripper_joint_pos_indexes)

        def read(_cache: dict[str, Any]) -> np.ndarray:
            w, x, y, z = data.get_body_xquat(robot.robot_model.eef_name)
            hand = (data.site_xpos[robot.eef_site_id], (x, y, z, w), data.qpos[fingers])
            return np.concatenate([*hand, *(array.ravel() for _, array in self._drawn_arrays())])

        read.__modality__ = self._clock.modality  # type: ignore[attr-defined]
        return read

    def _build(self, task: Task, assets: Path, scene_seed: int) -> Any:
        """Build the scene, twice: LIBERO's own construction is unseeded, so its seeded reset is what counts."""
        self._simulator.libero._assets_path_cache = str(assets)
        with _seeded(scene_seed), warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            try:
                control = self._retry_placement(
                    lambda: self._simulator.control_env(
                        bddl_file_name=str(task.goal_file),
                        has_offscreen_renderer=False,
                        use_camera_obs=False,
                        ignore_done=True,
                    )
                )
                _compute_once_more_after_loading(control.env)
                np.random.seed(scene_seed)
                self._retry_placement(control.env.reset)
            except FileNotFoundError as error:
                raise missing_asset(assets, f"{task.key} needs {error.filename}") from error
            except ValueError as error:
                if "file" in str(error) and str(assets) in str(error):
                    raise missing_asset(assets, f"{task.key}: {error}") from error
                raise
        return control.env

    def _retry_placement(self, attempt: Callable[[], Any]) -> Any:
        """Try again where the random placement of objects found no room; any other error surfaces at once."""
        for _ in range(_PLACEMENT_ATTEMPTS):
            with contextlib.suppress(self._simulator.randomization_error):
                return attempt()
        raise EnvError(f"the objects found no place in {_PLACEMENT_ATTEMPTS} attempts; choose another scene_seed.")


def _compute_once_more_after_loading(env: Any) -> None:
    """Do what robosuite does where it makes a render context: one more forward pass on a newly loaded model.

    The pass moves the solver's warm start, and with it the last bits of what follows.
    """
    load = env._initialize_sim

    def load_and_compute(xml_string: str | None = None) -> None:
        load(xml_string)
        env.sim.forward()

    env._initialize_sim = load_and_compute


def axis_angle(quaternion: np.ndarray) -> np.ndarray:
    """float64 [3], axis times angle in [0, 2 pi], of a unit quaternion (x, y, z, w); zero where there is no rotation."""
    w = min(max(float(quaternion[3]), -1.0), 1.0)
    sine = np.sqrt(1.0 - w * w)
    if np.isclose(sine, 0.0):
        return np.zeros(3)
    return np.asarray(quaternion[:3] * 2.0 * np.arccos(w) / sine)


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """LIBERO draws from NumPy's global generator: seed it, and give it back as it was."""
    before = np.random.get_state()
    np.random.seed(seed)
    try:
        yield
    finally:
        np.random.set_state(before)
