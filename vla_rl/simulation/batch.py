"""Observations of several environments side by side, written row by row into arrays that stand ready."""

from typing import Any

import numpy as np
from gymnasium import spaces


class ObservationBatch:
    """Row i is the newest observation of environment i; laid out as gymnasium's `batch_space` says.

    Arrays of one shape are stacked, anything else (texts) becomes a tuple.

    Args:
        space: of one environment.
        num_envs: rows.
    """

    def __init__(self, space: spaces.Space[Any], num_envs: int) -> None:
        self._space, self._num_envs = space, num_envs
        self._rows: Any = _empty(space, num_envs)

    def put(self, index: int, observation: Any) -> None:
        """Write one environment's observation into its row."""
        _put(self._space, self._rows, index, observation)

    def get(self) -> Any:
        """The batch; its arrays are the ones that later rows are written into."""
        return _frozen(self._space, self._rows)

    def fresh(self, *, keep_rows: bool) -> "ObservationBatch":
        """A batch with arrays of its own, holding these rows or nothing yet."""
        batch = ObservationBatch(self._space, self._num_envs)
        if keep_rows:
            batch._rows = _copied(self._space, self._rows)
        return batch


_STACKED = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)


def _empty(space: spaces.Space[Any], num_envs: int) -> Any:
    match space:
        case spaces.Dict():
            return {key: _empty(part, num_envs) for key, part in space.items()}
        case spaces.Tuple():
            return [_empty(part, num_envs) for part in space]
        case _ if isinstance(space, _STACKED):
            return np.empty((num_envs, *(space.shape or ())), space.dtype)
        case _:
            return [None] * num_envs


def _put(space: spaces.Space[Any], rows: Any, index: int, observation: Any) -> None:
    match space:
        case spaces.Dict():
            for key, part in space.items():
                _put(part, rows[key], index, observation[key])
        case spaces.Tuple():
            for place, part in enumerate(space):
                _put(part, rows[place], index, observation[place])
        case _:
            rows[index] = observation


def _frozen(space: spaces.Space[Any], rows: Any) -> Any:
    match space:
        case spaces.Dict():
            return {key: _frozen(part, rows[key]) for key, part in space.items()}
        case spaces.Tuple():
            return tuple(_frozen(part, rows[place]) for place, part in enumerate(space))
        case _:
            return rows if isinstance(rows, np.ndarray) else tuple(rows)


def _copied(space: spaces.Space[Any], rows: Any) -> Any:
    match space:
        case spaces.Dict():
            return {key: _copied(part, rows[key]) for key, part in space.items()}
        case spaces.Tuple():
            return [_copied(part, rows[place]) for place, part in enumerate(space)]
        case _:
            return rows.copy()
