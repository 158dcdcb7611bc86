"""The space of instructions, which stay readable in gymnasium's AsyncVectorEnv.

AsyncVectorEnv reads a plain `Text` in shared memory once, when it is made (gymnasium 1.4), so that
every instruction would be a row of the same letter. `Words` are read whenever an observation is
returned.
"""

import functools
from collections.abc import Sequence
from typing import Any, overload

from gymnasium import spaces
from gymnasium.vector.utils import read_from_shared_memory


class Words(spaces.Text):
    """A `Text` whose shared memory is read at each access."""


class WordsInMemory(Sequence[str]):
    """The present words of each environment; a copy is a tuple of strings."""

    def __init__(self, space: Words, memory: Any, num: int) -> None:
        self._num = num
        self._read = functools.partial(
            read_from_shared_memory.dispatch(spaces.Text), space, memory, n=num
        )

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[str, ...]: ...
    def __getitem__(self, index: int | slice) -> str | tuple[str, ...]:
        return tuple(map(str, self._read()))[index]

    def __len__(self) -> int:
        return self._num

    def __deepcopy__(self, memo: dict[int, Any]) -> tuple[str, ...]:
        return self[:]


@read_from_shared_memory.register(Words)
def _read_words(space: Words, shared_memory: Any, n: int = 1) -> WordsInMemory:
    return WordsInMemory(space, shared_memory, n)
