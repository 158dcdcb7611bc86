"""Environments that simulator processes of tests run, and whether two of them give the same.

Some answer a step with whatever they are told to, break in one method, have two cameras or something to
call; others are prepared before their processes are forked, in good ways and bad ones.
"""

import ctypes
import os
import sys
import threading
import time
from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium import spaces

_MODELS: dict[int, np.ndarray] = {}
_MADE_BY: dict[int, int] = {}


class Odd(gymnasium.Env[np.ndarray, np.ndarray]):
    """Returns `answers[kind]` for a step."""

    observation_space = spaces.Box(0.0, 1.0, (1,), np.float32)
    action_space = spaces.Box(-1.0, 1.0, (1,), np.float32)

    def __init__(self, answer: str = "sound") -> None:
        self._answer = answer

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action: np.ndarray) -> Any:
        if self._answer == "exits":
            sys.exit(3)
        seen = np.zeros(1, np.float32)
        return {
            "sound": (seen, 1.0, False, False, {}),
            "old_api": (seen, 1.0, False, {}),
            "nothing": None,
            "no_reward": (seen, None, False, False, {}),
            "says_no": (seen, 1.0, False, False, {"is_success": "no"}),
            "share": (seen, 1.0, False, False, {"is_success": 0.3}),
            "tasks": (seen, 1.0, False, False, {"is_success": {"task": False}}),
            "whole": (seen, 1.0, False, False, {"is_success": np.array([1.0], np.float32)}),
            "numbered": (seen, 1.0, False, False, {5: 1}),
            "list": (seen, 1.0, [False], False, {}),
            "array": (seen, 1.0, np.array([True]), 0, {"is_success": np.array([False])}),
        }[self._answer]


gymnasium.register("test/Odd-v0", Odd, order_enforce=False)


class Breaking(gymnasium.Env[np.ndarray, np.ndarray]):
    """Raises in the methods named by `at`, such as "step close"."""

    observation_space = spaces.Box(0.0, 99.0, (1,), np.float32)
    action_space = spaces.Box(-1.0, 1.0, (1,), np.float32)
    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["rgb_array"], "render_fps": 4}
    closed: ClassVar[list[str]] = []

    def __init__(self, at: str = "", name: str = "", render_mode: str | None = None) -> None:
        self._at, self._name, self.render_mode = at.split(), name, render_mode
        self._count = 0

    def _reach(self, method: str) -> None:
        if method in self._at:
            raise RuntimeError(f"{self._name} broke in {method}")

    def _seen(self) -> np.ndarray:
        return np.array([self._count], np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self._reach("reset")
        self._count = 0
        return self._seen(), {}

    def step(self, action: np.ndarray) -> Any:
        self._count += 1
        self._reach("step")
        return self._seen(), 1.0, False, False, {}

    def render(self) -> Any:
        self._reach("render")
        return np.zeros((2, 2, 3), np.uint8)

    def count(self) -> int:
        self._reach("count")
        return self._count

    def get_state(self) -> int:
        self._reach("get_state")
        return self._count

    def set_state(self, state: int) -> np.ndarray:
        self._reach("set_state")
        self._count = state
        return self._seen()

    def close(self) -> None:
        self.closed.append(self._name)
        self._reach("close")


gymnasium.register("test/Breaking-v0", Breaking, order_enforce=False)


_IMAGE = spaces.Box(0, 255, (2, 2, 3), np.uint8)


class TwoCameras(gymnasium.Env[dict[str, Any], np.ndarray]):
    """After control step k `image` is k all over, and `wrist_image` 100 + k.

    Renders one of them, or 200 + k.
    """

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012 - gymnasium declares it per instance
    observation_space = spaces.Dict({"image": _IMAGE, "wrist_image": _IMAGE})
    action_space = spaces.Box(-1.0, 1.0, (1,), np.float32)

    def __init__(self, render_key: str | None = None) -> None:
        self.render_mode = "rgb_array"
        if render_key is not None:
            self.render_key = render_key
        self._num_steps = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Begin at step 0."""
        super().reset(seed=seed)
        self._num_steps = 0
        return self._observe(), {}

    def step(self, action: np.ndarray) -> Any:
        """Count on; the sixth step is the last."""
        self._num_steps += 1
        return self._observe(), 0.0, False, self._num_steps == 6, {}

    def render(self) -> Any:
        """The image that `render_key` names, else a third one."""
        return (
            self._observe()[self.render_key]
            if hasattr(self, "render_key")
            else _shade(200 + self._num_steps)
        )

    def _observe(self) -> dict[str, Any]:
        return {"image": _shade(self._num_steps), "wrist_image": _shade(100 + self._num_steps)}


def _shade(shade: int) -> np.ndarray:
    return np.full((2, 2, 3), shade, np.uint8)


gymnasium.register(id="two/cameras-v0", entry_point="sample_envs:TwoCameras")


class Needy(Odd):
    """One that cannot be made without a size."""

    def __init__(self, size: int, colour: str = "red") -> None:
        super().__init__()


gymnasium.register(id="test/Needy-v0", entry_point="sample_envs:Needy")


class Heavy(gymnasium.Env[dict[str, Any], np.ndarray]):
    """Needs a model of `megabytes` that never changes; says who made it, and what drives it."""

    observation_space = spaces.Dict(
        {"state": spaces.Box(0, 1, (1,), np.float32), "instruction": spaces.Text(10)}
    )
    action_space = spaces.Box(-1.0, 1.0, (1,), np.float32)

    def __init__(self, megabytes: int = 1, colour: str = "red") -> None:
        self.prepare(megabytes)
        self._megabytes, self._colour = megabytes, colour

    @classmethod
    def prepare(cls, megabytes: int = 1, **_of_each_env: object) -> None:
        """Build the model, once in a process and its forks."""
        if megabytes not in _MODELS:
            _MODELS[megabytes] = np.ones(megabytes * 2**20, np.uint8)
            _MADE_BY[megabytes] = os.getpid()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Begin an episode; one asked to hang does so where the process number is even."""
        super().reset(seed=seed)
        info = {
            "pid": os.getpid(),
            "parent": os.getppid(),
            "made_by": _MADE_BY[self._megabytes],
            "colour": self._colour,
            "device": os.environ.get("MUJOCO_EGL_DEVICE_ID", ""),
            "draw": float(np.random.random()),
        }
        ledger = (options or {}).get("hang_once")
        if ledger is not None and not os.path.exists(ledger):
            open(ledger, "w").close()
            # holds the interpreter: no thread of this process can do anything
            ctypes.PyDLL(None).sleep(3600)
        return self._observe(), info

    def step(self, action: np.ndarray) -> Any:
        """Nothing changes."""
        return self._observe(), 0.0, False, False, {}

    def _observe(self) -> dict[str, Any]:
        return {"state": np.zeros(1, np.float32), "instruction": "stay"}


class StartsThread(Heavy):
    """Its preparation leaves a thread."""

    @classmethod
    def prepare(cls, megabytes: int = 1, **_of_each_env: object) -> None:
        """Start it."""
        threading.Thread(target=time.sleep, args=(3600,), name="prefetcher", daemon=True).start()


class OpensDisplay(Heavy):
    """Its preparation opens a display, as an import of a renderer may."""

    @classmethod
    def prepare(cls, megabytes: int = 1, **_of_each_env: object) -> None:
        """Open it."""
        from vla_rl.envs.mujoco.loading import choose_graphics

        choose_graphics()


class Hangs(Heavy):
    """Its preparation never ends."""

    @classmethod
    def prepare(cls, megabytes: int = 1, **_of_each_env: object) -> None:
        """Wait."""
        time.sleep(3600)


for _class in (Heavy, StartsThread, OpensDisplay, Hangs):
    gymnasium.register(
        id=f"test/{_class.__name__}-v0", entry_point=f"sample_envs:{_class.__name__}", kwargs={}
    )
gymnasium.register(id="test/Big-v0", entry_point="sample_envs:Heavy", kwargs={"megabytes": 64})


class Scaled(gymnasium.ObservationWrapper[np.ndarray, Any, np.ndarray]):
    """Multiplies the observation."""

    def __init__(self, env: gymnasium.Env[Any, Any], factor: float = 2.0) -> None:
        super().__init__(env)
        self.factor = factor
        self.observation_space = spaces.Box(
            -np.inf, np.inf, env.observation_space.shape, np.float32
        )

    def observation(self, observation: np.ndarray) -> np.ndarray:
        return (self.factor * observation).astype(np.float32)


class Lamp(gymnasium.Env[np.ndarray, np.int64]):
    """Has a colour to set, a size that is a tuple, a method that may refuse, and something that
    cannot travel.
    """

    observation_space = spaces.Box(0.0, 1.0, (1,), np.float32)
    action_space = spaces.Discrete(2)
    size = (3, (4, 5))
    names: ClassVar = ["left", {"right": (1, None)}]
    thing = object()

    def __init__(self, colour: str = "red", render_mode: str | None = None) -> None:
        self.colour, self.render_mode = colour, render_mode

    def shine(self, times: int, *, loud: bool = False) -> str:
        if times < 0:
            raise ValueError(f"times is {times}")
        return self.colour * times + "!" * loud

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action: np.int64) -> Any:
        return np.zeros(1, np.float32), 0.0, False, False, {}


gymnasium.register("test/Lamp-v0", Lamp)


def assert_same(ours: Any, theirs: Any, where: str) -> None:
    """Equal values, kinds, shapes and dtypes, all the way down."""
    if isinstance(theirs, dict):
        assert ours.keys() == theirs.keys(), where
        for key in theirs:
            assert_same(ours[key], theirs[key], f"{where}[{key!r}]")
    elif isinstance(theirs, np.ndarray) and theirs.dtype == object:
        assert_same(list(ours), list(theirs), where)
    elif isinstance(theirs, np.ndarray):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape), where
        assert np.array_equal(ours, theirs), where
    elif isinstance(theirs, list | tuple):
        assert len(ours) == len(theirs), where
        for index, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            assert_same(one, other, f"{where}[{index}]")
    else:
        assert ours == theirs, where
