"""Actions are looked at before they leave: a wrong one is the caller's mistake and must not reach a simulator."""

from typing import Any

import numpy as np
from gymnasium import spaces

from vla_rl.simulation.spaces import spell


class ActionGate:
    """Turns what a caller gives into what an action space takes, or says what is wrong with it.

    Args:
        space: of one control step.
        env_id: how errors speak of the environment.
    """

    def __init__(self, space: spaces.Space[Any], env_id: str) -> None:
        self._space, self._env_id = space, env_id
        self._box = space if isinstance(space, spaces.Box) else None
        self._dtype = space.dtype
        self._shape = space.shape or ()

    def one(self, action: Any) -> Any:
        """An action of one control step. Raises: ValueError saying what is wrong with it."""
        if self._box is not None:
            return self._in_box(self._box, action, self._shape, "action")
        if isinstance(self._space, spaces.Discrete):
            return self._discrete(self._space, action)
        if isinstance(self._space, spaces.MultiDiscrete | spaces.MultiBinary):
            action = np.asarray(action, self._dtype)
        if not self._space.contains(action):
            raise ValueError(f"action for {self._env_id} is {spell(action)}, expected a value of {self._space}.")
        return action

    def chunk(self, actions: Any) -> np.ndarray:
        """Rows of actions, [H, *shape] with H >= 1. Raises: ValueError saying what is wrong with them."""
        if self._box is None:
            raise ValueError(f"{self._env_id} takes actions of {self._space}; only those of a Box come in chunks.")
        array = np.asarray(actions)
        if array.ndim != len(self._shape) + 1 or len(array) < 1:
            expected = ["H >= 1", *self._shape]
            raise ValueError(f"action chunk for {self._env_id} is {spell(array)}, expected {expected}.")
        return self._in_box(self._box, array, (len(array), *self._shape), "action chunk")

    def _in_box(self, box: spaces.Box, action: Any, shape: tuple[int, ...], what: str) -> np.ndarray:
        array = np.asarray(action)
        if array.dtype != self._dtype or array.shape != shape:
            if array.shape != shape or not np.can_cast(array.dtype, self._dtype, "same_kind"):
                raise ValueError(f"{what} for {self._env_id} is {spell(array)}, expected {self._dtype} {list(shape)}.")
            array = array.astype(self._dtype)
        if b"\0" in ((array >= box.low) & (array <= box.high)).tobytes():  # a NaN is neither
            self._refuse_range(box, array, what)
        return array

    def _refuse_range(self, box: spaces.Box, array: np.ndarray, what: str) -> None:
        wrong = ~((array >= box.low) & (array <= box.high))
        where = tuple(int(index) for index in np.argwhere(wrong)[0])
        low, high = (np.broadcast_to(bound, array.shape)[where] for bound in (box.low, box.high))
        raise ValueError(
            f"{what} for {self._env_id} holds {array[where]} at {list(where)}, expected {low} to {high}; "
            f"{int(wrong.sum())} of {array.size} numbers are out of range or not finite."
        )

    def _discrete(self, space: spaces.Discrete[Any], action: Any) -> int:
        if not isinstance(action, int | np.integer | np.ndarray) or np.ndim(action) != 0:
            raise ValueError(f"action for {self._env_id} is {spell(action)}, expected a whole number of {space}.")
        number = int(action)
        if not space.start <= number < space.start + space.n:
            raise ValueError(f"action for {self._env_id} is {number}, expected a value of {space}.")
        return number
