"""Files for the ranks on other hosts: the policy at their start, and what they read of a checkpoint.

Each host gets a file once, through its first rank, whatever the number of its ranks; of a checkpoint
it gets the bytes that its ranks read, at their places in a file with holes.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Final, TypeAlias, TypeVar

from vla_rl.learner.distributed.far_rank import in_pieces, merged, read_bytes
from vla_rl.learner.distributed.in_order import in_order
from vla_rl.learner.distributed.rank import LearnerRank
from vla_rl.learner.distributed.same_code import code_report, require_same_code
from vla_rl.learner.distributed.seats import Seating
from vla_rl.learner.distributed.state import read_header

T = TypeVar("T")

Needed: TypeAlias = Callable[[LearnerRank, list[str]], Awaitable[list[list[tuple[int, int]]]]]
"""Asks a rank for the bytes that it reads of some files, given their paths there."""

NUM_ROUND_TRIPS: Final = 5
"""Questions for another host's clock, of which the quickest answer counts."""


async def clock_offset_s(rank: LearnerRank) -> float:
    """Return what to add to times of a rank's host to have them on this host's clock."""
    found = []
    for _ in range(NUM_ROUND_TRIPS):
        begun = time.monotonic()
        there = await rank.now()
        ended = time.monotonic()
        found.append((ended - begun, (begun + ended) / 2 - there))
    return min(found)[1]


class FarHosts:
    """The other hosts of a learner's ranks.

    Args:
        ranks: handles of all ranks, by number.
        seating: where they are.
    """

    def __init__(self, ranks: Sequence[LearnerRank], seating: Seating) -> None:
        self._ranks, self._hosts = ranks, seating.far_hosts
        self._first = {numbers[0]: host for host, numbers in self._hosts.items()}

    def is_far(self, rank: int) -> bool:
        """Return whether a rank is on another host."""
        return any(rank in numbers for numbers in self._hosts.values())

    async def require_same_code(self, rank: int, policy_class: str) -> None:
        """Raise ConfigError if this is the first rank of a host that has other code."""
        host = self._first.get(rank)
        if host is not None:
            there = await self._ranks[rank].code(policy_class)
            require_same_code(host, there, await asyncio.to_thread(code_report, policy_class))

    async def bring_folder(self, rank: int, folder: Path) -> str | None:
        """Send a folder, if this is the first rank of a host; return where it is there."""
        if rank not in self._first:
            return None
        path = ""
        for file in await asyncio.to_thread(_files_below, folder):
            name = str(Path(folder.name) / file.relative_to(folder))
            found = await self._send(rank, file, name, [(0, file.stat().st_size)])
            path = found.removesuffix(name) + folder.name
        return path

    async def bring_needed(self, rank: int, files: Sequence[Path], needed: Needed) -> list[str]:
        """Send what the ranks of a host read of some files, if this is its first rank.

        Returns: the paths of the files there, for the ranks of this host; none for another rank.
        """
        host = self._first.get(rank)
        if host is None:
            return []
        paths = []
        for number, file in enumerate(files):
            header, _ = await asyncio.to_thread(read_header, file)
            paths.append(await self._send(rank, file, f"checkpoint-{number}", [(0, len(header))]))
        asked = [await needed(self._ranks[each], paths) for each in self._hosts[host]]
        for number, file in enumerate(files):
            ranges = merged([each for of_rank in asked for each in of_rank[number]])
            await self._send(rank, file, f"checkpoint-{number}", ranges)
        return paths

    def of_each(self, found: Sequence[T]) -> list[T | None]:
        """Return for each rank what the first rank of its host has; None for ranks on this host."""
        by_rank: list[T | None] = [None] * len(self._ranks)
        for numbers in self._hosts.values():
            for number in numbers:
                by_rank[number] = found[numbers[0]]
        return by_rank

    async def remove(self, rank: int) -> None:
        """Remove what was sent, if this is the first rank of a host."""
        if rank in self._first:
            await self._ranks[rank].remove()

    async def _send(
        self, rank: int, file: Path, name: str, ranges: Sequence[tuple[int, int]]
    ) -> str:
        size = (await asyncio.to_thread(file.stat)).st_size

        async def send(piece: tuple[int, int]) -> str:
            data = await asyncio.to_thread(read_bytes, file, *piece)
            return await self._ranks[rank].put(name, size, piece[0], data)

        # an empty file has one piece too
        pieces = in_pieces(ranges) or [(0, 0)]
        found = await in_order(send, pieces)
        return found[-1]


def _files_below(folder: Path) -> list[Path]:
    return sorted(each for each in folder.rglob("*") if each.is_file())
