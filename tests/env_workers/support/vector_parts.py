"""Wrappers of one's own, an environment with something to call and to set, and whether two vector
environments give the same.
"""

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
