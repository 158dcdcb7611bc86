"""Wrappers of one's own, and an environment with something to call and to set."""

from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium import spaces


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
