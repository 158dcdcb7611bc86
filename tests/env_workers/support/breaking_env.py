"""An environment that breaks its contract in the method that it is told to, and records in its
class which instances were closed.
"""

from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium import spaces


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
