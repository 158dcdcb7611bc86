"""One task's simulation without cameras: Meta-World's own environment, with starts by number.

Meta-World draws a start when an environment is reset, from generators that its `reset(seed)` does
not set, and rejects some draws in a loop that would not end for a fixed one. It also resets on top
of what the last episode left. Here each start begins from the state in which the environment was
built, with the vector that its own code draws from a generator that the task and the number of the
start seed. So a start depends on (task, number) alone, and what follows is what Meta-World itself
computes for that vector, bit by bit.

The environment keeps state in MuJoCo's data, in poses of bodies and sites of the model, and in
attributes of its own. Some of these attributes are windows into MuJoCo's data: they show the newest
values, so they are neither saved nor restored but made by the reset of the same start.
"""

import copy
import functools
import importlib
import importlib.metadata
import sys
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import numpy as np

from vla_rl.envs.metaworld.tasks import Task
from vla_rl.envs.mujoco.cameras import DRAWN_FIELDS
from vla_rl.envs.mujoco.loading import load_mujoco, quiet_imports
from vla_rl.errors import EnvError, PackageError
from vla_rl.types import derive_seed
from vla_rl.util.installing import pip_command

VERSION: Final = "3.0.0"
"""Version whose tasks, success criteria and experts this package was made for."""


class MetaWorldCode(NamedTuple):
    """The loaded package."""

    envs: Mapping[str, Any]
    """Class of each task's environment, by its full name, such as `drawer-open-v3`."""

    experts: Mapping[str, Any]
    """Class of each task's scripted policy, by the same names."""


@functools.cache
def load_metaworld() -> MetaWorldCode:
    """Import metaworld, once in a process, without OpenGL, so that the process can still fork.

    Raises: `ImportError` if it is not installed, `EnvError` for another version.
    """
    try:
        found = importlib.metadata.version("metaworld")
    except importlib.metadata.PackageNotFoundError:
        raise PackageError(
            f"Meta-World is not installed; run `{pip_command('metaworld')}`."
        ) from None
    if found != VERSION:
        raise EnvError(
            f"metaworld is {found}, expected {VERSION}, because tasks and experts differ between "
            f"versions; run `{pip_command('metaworld')}`."
        )
    load_mujoco()
    with quiet_imports():
        envs = importlib.import_module("metaworld.env_dict").ALL_V3_ENVIRONMENTS
        experts = importlib.import_module("metaworld.policies").ENV_POLICY_MAP
    return MetaWorldCode(envs, experts)


_CORNER2_M: Final = (0.75, 0.075, 0.7)
"""Place of the fixed camera: that of public data sets and policies (Seo et al. 2022,
arXiv:2206.14244). From Meta-World's own place, 0.8 m further away, objects are a few pixels."""

_MOVED_FIELDS: Final = ("body_pos", "body_quat", "site_pos", "site_quat")
"""Arrays of the model that a reset writes."""

_KINDS: Final = (type(None), bool, int, float, np.ndarray, np.generic, list, dict)
"""Types of the attributes that are state; all others are the model, names, spaces, generators."""


class Scene:
    """The simulation of one task."""

    def __init__(self, task: Task) -> None:
        self._mujoco, self._task = load_mujoco(), task
        env = load_metaworld().envs[f"{task.name}-v3"]()
        env._set_task_called, env._partially_observable = True, False
        # It was cached before the goal became observable.
        del env.sawyer_observation_space
        env.model.camera("corner2").pos = _CORNER2_M
        # The step limit of an episode is the environment's own.
        env.max_path_length = sys.maxsize
        self._env: Any = env
        self._as_built = self._saved()
        self._windows = {name: vars(env)[name] for name in self._window_names()}
        self._start = -1
        self.observation = np.zeros(0)
        """Meta-World's own observation, float64 [39], with the hidden state; for experts."""

        self.dense_reward = 0.0
        """Meta-World's reward of the last control step, 0 to 10."""

    @property
    def model(self) -> Any:
        """MuJoCo's `MjModel`."""
        return self._env.model

    @property
    def task_name(self) -> str:
        """Meta-World's name of the task, such as `drawer-open`."""
        return self._task.name

    @property
    def drawn(self) -> dict[str, np.ndarray]:
        """Input of an image, as `Cameras.draw` takes it; overwritten by the next step."""
        arrays = {name: getattr(self._env.data, name) for name in DRAWN_FIELDS}
        return {**arrays, "site_rgba": self.model.site_rgba}

    def start_episode(self, start: int) -> None:
        """Put the simulation to the start with this number."""
        vector = self._draw_vector(start)
        self._rebuild()
        self._env._freeze_rand_vec, self._env._last_rand_vec = True, vector
        self.observation, _ = self._env.reset()
        self._start, self.dense_reward = start, 0.0
        # Meta-World moves bodies after it last computed poses, so an image would show them where
        # they were
        self._compute_poses()

    def run_control_step(self, action: np.ndarray) -> bool:
        """Run one control step of 12.5 ms with float64 [4]; return whether the task is solved."""
        self.observation, reward, _, _, info = self._env.step(action.astype(np.float32))
        self.dense_reward = float(reward)
        return bool(info["success"])

    def get_state(self) -> dict[str, Any]:
        """Return all state that a later step depends on, as plain values."""
        return {
            **self._saved(),
            "start": self._start,
            "observation": self.observation.copy(),
            "dense_reward": self.dense_reward,
        }

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that `get_state` returned for the same task, in this scene or
        another one.
        """
        if state["start"] >= 0:
            self.start_episode(
                state["start"]
            )  # makes the attributes that are windows into the data
        self._restore(state)
        self._start = state["start"]
        self.observation = np.array(state["observation"], np.float64)
        self.dense_reward = float(state["dense_reward"])

    def close(self) -> None:
        """Free the simulation."""
        self._env.close()

    def _draw_vector(self, start: int) -> np.ndarray:
        """Return the vector of a start: the first that Meta-World's own reset accepts."""
        self._rebuild()
        env = self._env
        # Meta-World's `reset(seed)` does not set this generator: two environments with one seed
        # began differently.
        env.np_random = np.random.default_rng(
            derive_seed(start, "metaworld start", self._task.name)
        )
        env._freeze_rand_vec, env.seeded_rand_vec = False, True
        env.reset_model()
        return np.array(env._last_rand_vec, np.float64)

    def _rebuild(self) -> None:
        """Put everything to the state in which the environment was built."""
        for name in self._attributes():
            delattr(self._env, name)
        vars(self._env).update(self._windows)
        self._mujoco.mj_resetData(self.model, self._env.data)
        self._restore(self._as_built)

    def _saved(self) -> dict[str, Any]:
        return {
            "physics": self._physics(),
            **{name: getattr(self.model, name).copy() for name in _MOVED_FIELDS},
            "attributes": copy.deepcopy(self._attributes()),
        }

    def _restore(self, state: Mapping[str, Any]) -> None:
        """Write a saved state; poses are computed, and windows into the data stay what they are."""
        for name in _MOVED_FIELDS:
            getattr(self.model, name)[:] = state[name]
        windows = self._window_names()
        for name, value in copy.deepcopy(dict(state["attributes"])).items():
            if name not in windows:
                setattr(self._env, name, value)
        self._set_physics(state["physics"])
        self._compute_poses()

    def _compute_poses(self) -> None:
        """Compute what depends on positions, without the change of the solver's warm start that
        comes with it.
        """
        physics = self._physics()
        self._mujoco.mj_forward(self.model, self._env.data)
        self._set_physics(physics)

    def _attributes(self) -> dict[str, Any]:
        """Return the environment's own state: attributes that are values, not windows."""
        windows = self._window_names()
        return {
            name: value
            for name, value in vars(self._env).items()
            if isinstance(value, _KINDS) and name not in windows
        }

    def _window_names(self) -> set[str]:
        """Return the attributes that are windows into MuJoCo's data."""
        data = self._env.data
        return {
            name
            for name, value in vars(self._env).items()
            if isinstance(value, np.ndarray)
            and any(
                np.shares_memory(value, getattr(data, field))
                for field in ("xpos", "xquat", "site_xpos", "geom_xpos", "qpos", "qvel")
            )
        }

    def _physics(self) -> np.ndarray:
        every = self._mujoco.mjtState.mjSTATE_INTEGRATION
        physics = np.empty(self._mujoco.mj_stateSize(self.model, every))
        self._mujoco.mj_getState(self.model, self._env.data, physics, every)
        return physics

    def _set_physics(self, physics: np.ndarray) -> None:
        every = self._mujoco.mjtState.mjSTATE_INTEGRATION
        self._mujoco.mj_setState(self.model, self._env.data, np.asarray(physics, np.float64), every)
