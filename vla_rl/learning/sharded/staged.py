"""Tensors of a file that the ranks have copied, and that they write in place."""

import asyncio
from pathlib import Path

from vla_rl.learning.sharded.group import RankGroup
from vla_rl.learning.sharded.state import Entry, create_file, nbytes_of


class RankTensors:
    """Tensors of one file that the ranks have staged.

    Args:
        group: the ranks.
        number: number of the snapshot.
        name: name of the file among those that were staged.
        entries: its tensors.
    """

    def __init__(self, group: RankGroup, number: int, name: str, entries: dict[str, Entry]) -> None:
        self._group, self._number, self._name = group, number, name
        self._entries, self._loop = entries, asyncio.get_running_loop()

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return nbytes_of(self._entries)

    def write_file(self, path: Path) -> None:
        """Write the file, from any thread but the loop's. Raises: CheckpointError, RankFailed."""
        begins = create_file(path, self._entries)
        writing = write_staged(self._group, self._number, self._name, path, begins)
        asyncio.run_coroutine_threadsafe(writing, self._loop).result()


async def write_staged(
    group: RankGroup, number: int, name: str, path: Path, begins: dict[str, int]
) -> None:
    """Let every rank write its part of a staged file. Raises: CheckpointError, RankFailed."""
    await group.each(rank.write(number, name, str(path), begins) for rank in group.ranks)
