"""An environment that answers a step with whatever it is told to; and a module that registers
nothing else.
"""

import sys
from typing import Any

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
        }[self._answer]


gymnasium.register("test/Odd-v0", Odd, order_enforce=False)
