"""Check actions before they are sent.

A wrong action is the caller's mistake and must not reach a simulator.
"""

from operator import le
from typing import Any

import numpy as np
from gymnasium import spaces

from vla_rl.env_workers.spaces import spell

_SHORT = 32


class ActionGate:
    """Converts a caller's action to a value of the action space, or describes its mistake.

    Args:
        space: action space of one control step.
        env_id: name of the environment in errors.
    """

    def __init__(self, space: spaces.Space[Any], env_id: str) -> None:
        self._space, self._env_id = space, env_id
        self._box = space if isinstance(space, spaces.Box) else None
        self._dtype = space.dtype
        self._shape = space.shape or ()
        self._bounds: tuple[list[float], list[float]] | None = None
        """Bounds of a short vector, which is checked faster as Python numbers."""
        if self._box is not None and len(self._shape) == 1 and self._shape[0] <= _SHORT:
            self._bounds = self._box.low.tolist(), self._box.high.tolist()

    def one(self, action: Any) -> Any:
        """Check an action of one control step. Raises: ValueError describing the mistake."""
        if self._box is not None:
            if (
                self._bounds is not None
                and type(action) is np.ndarray
                and action.dtype is self._dtype
            ):
                low, high = self._bounds
                numbers = action.tolist()
                if (
                    action.shape == self._shape
                    and all(map(le, low, numbers))
                    and all(map(le, numbers, high))
                ):
                    return action  # a NaN is not
            return self._in_box(self._box, action, self._shape, "action")
        if isinstance(self._space, spaces.Discrete):
            return self._discrete(self._space, action)
        if isinstance(self._space, spaces.MultiDiscrete | spaces.MultiBinary):
            action = np.asarray(action, self._dtype)
        if not self._space.contains(action):
            raise ValueError(
                f"action for {self._env_id} is {spell(action)}, expected a value of {self._space}."
            )
        return action

    def packed_rows(self, actions: Any) -> list[Any] | None:
        """Check all rows at once; return each packed, or None if they need single checks."""
        box = self._box
        if box is None or type(actions) is not np.ndarray or actions.dtype is not self._dtype:
            return None
        if (
            actions.shape[1:] != self._shape
            or not ((actions >= box.low) & (actions <= box.high)).all()
        ):
            return None
        return [row.tobytes() for row in actions]

    def pack(self, action: Any) -> Any:
        """Return the form of a checked action for sending.

        Of a Box it is only the bytes, since the receiver knows the rest.
        """
        return action.tobytes() if self._box is not None else action

    def unpack(self, packed: Any) -> Any:
        """Return the action that was given to `pack`; read-only."""
        return np.ndarray(self._shape, self._dtype, packed) if self._box is not None else packed

    def chunk(self, actions: Any) -> np.ndarray:
        """Check rows of actions, [H, *shape] with H >= 1.

        Raises: ValueError describing the mistake.
        """
        if self._box is None:
            raise ValueError(
                f"{self._env_id} takes actions of {self._space}; action chunks need a Box space."
            )
        array = np.asarray(actions)
        if array.ndim != len(self._shape) + 1 or len(array) < 1:
            shape = ", ".join(["H", *map(str, self._shape)])
            raise ValueError(
                f"action chunk for {self._env_id} is {spell(array)}, expected {self._dtype} "
                f"[{shape}] with H >= 1 rows; pass a single action to `step`."
            )
        return self._in_box(self._box, array, (len(array), *self._shape), "action chunk")

    def _in_box(
        self, box: spaces.Box, action: Any, shape: tuple[int, ...], what: str
    ) -> np.ndarray:
        array = np.asarray(action)
        if array.dtype != self._dtype or array.shape != shape:
            if array.shape != shape or not np.can_cast(array.dtype, self._dtype, "same_kind"):
                raise ValueError(
                    f"{what} for {self._env_id} is {spell(array)}, expected "
                    f"{self._dtype} {list(shape)}."
                )
            array = array.astype(self._dtype)
        if b"\0" in ((array >= box.low) & (array <= box.high)).tobytes():  # a NaN is neither
            self._refuse_range(box, array, what)
        return array

    def _refuse_range(self, box: spaces.Box, array: np.ndarray, what: str) -> None:
        wrong = ~((array >= box.low) & (array <= box.high))
        where = tuple(int(index) for index in np.argwhere(wrong)[0])
        low, high = (np.broadcast_to(bound, array.shape)[where] for bound in (box.low, box.high))
        raise ValueError(
            f"{what} for {self._env_id} holds {array[where]} at {list(where)}, expected {low} to "
            f"{high}; {int(wrong.sum())} of {array.size} numbers are out of range or not finite."
        )

    def _discrete(self, space: spaces.Discrete[Any], action: Any) -> int:
        if not isinstance(action, int | np.integer | np.ndarray) or np.ndim(action) != 0:
            raise ValueError(
                f"action for {self._env_id} is {spell(action)}, expected a whole number of {space}."
            )
        number = int(action)
        if not space.start <= number < space.start + space.n:
            raise ValueError(f"action for {self._env_id} is {number}, expected a value of {space}.")
        return number
