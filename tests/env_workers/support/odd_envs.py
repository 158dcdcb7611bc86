"""Environments that answer a step with whatever they are told to, that break in one method, that have
two cameras.
"""

import sys
from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium import spaces


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


gymnasium.register(id="two/cameras-v0", entry_point="odd_envs:TwoCameras")


class Needy(Odd):
    """One that cannot be made without a size."""

    def __init__(self, size: int, colour: str = "red") -> None:
        super().__init__()


gymnasium.register(id="test/Needy-v0", entry_point="odd_envs:Needy")
