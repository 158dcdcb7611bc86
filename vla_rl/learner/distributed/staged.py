"""Tensors of a file that the ranks have copied, and that they write in place."""

import asyncio
from collections.abc import Mapping
from pathlib import Path

from vla_rl.errors import CheckpointError
from vla_rl.learner.distributed.far_rank import FilePiece
from vla_rl.learner.distributed.group import RankGroup
from vla_rl.learner.distributed.state import Entry, create_file, nbytes_of, write_runs
from vla_rl.learner.training import StagedTensors


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
        self.entries, self._loop = entries, asyncio.get_running_loop()

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return nbytes_of(self.entries)

    def write_file(self, path: Path) -> None:
        """Write the file, from any thread but the loop's. Raises: CheckpointError, RankFailed."""
        self.write_into(path, create_file(path, self.entries))

    def write_into(self, path: Path, begins: Mapping[str, int]) -> None:
        """Write the tensors into a file, each at its byte of `begins`."""
        writing = write_staged(self._group, self._number, self._name, path, dict(begins))
        asyncio.run_coroutine_threadsafe(writing, self._loop).result()


class JoinedTensors:
    """Tensors of one file that the ranks of several learners have staged.

    Args:
        parts: those of each learner, by the beginning of their names in the file.
    """

    def __init__(self, parts: Mapping[str, StagedTensors]) -> None:
        self._parts: dict[str, RankTensors] = {}
        for prefix, part in parts.items():
            assert isinstance(part, RankTensors)
            self._parts[prefix] = part

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(part.nbytes for part in self._parts.values())

    def write_file(self, path: Path) -> None:
        """Write the file, from any thread but the loop's. Raises: CheckpointError, RankFailed."""
        entries = {
            f"{prefix}{name}": entry
            for prefix, part in self._parts.items()
            for name, entry in part.entries.items()
        }
        begins = create_file(path, entries)
        for prefix, part in self._parts.items():
            part.write_into(path, {name: begins[f"{prefix}{name}"] for name in part.entries})


async def write_staged(
    group: RankGroup, number: int, name: str, path: Path, begins: dict[str, int]
) -> None:
    """Let every rank write its part of a staged file; write those of other hosts here.

    Raises: CheckpointError, RankFailed.
    """

    async def write(rank: int) -> None:
        if not group.far.is_far(rank):
            await group.ranks[rank].write(number, name, str(path), begins)
            return
        async for piece in group.ranks[rank].pieces(number, name, begins):
            await asyncio.to_thread(_write, path, piece)

    await group.each(write(rank) for rank in range(len(group.ranks)))


def _write(path: Path, piece: FilePiece) -> None:
    try:
        with path.open("r+b") as file:
            write_runs(file.fileno(), piece.data, piece.at, piece.run, piece.distance)
    except OSError as error:
        raise CheckpointError(f"{path} could not be written: {error}") from error
