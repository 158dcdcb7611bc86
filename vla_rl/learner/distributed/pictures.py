"""Pictures on shelves of other hosts, copied beside the ranks that read them."""

from collections.abc import AsyncIterator, Collection, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from vla_rl.types import Observation, ShelvedArray


@dataclass(frozen=True)
class Loan:
    """Copies of pictures on the shelf of a host."""

    host: str
    keys: tuple[int, ...]
    """Memories there that hold them."""

    places: dict[ShelvedArray, ShelvedArray]
    """The copy of each."""


class PictureLender(Protocol):
    """Copies pictures from the shelf of one host to another's."""

    async def lend(self, host: str, pictures: Collection[ShelvedArray]) -> Loan:
        """Copy pictures to the shelf of `host`. Raises: RankFailed if that cannot be."""
        ...

    async def take_back(self, loan: Loan) -> None:
        """Note that the copies were read, so that they may be freed."""
        ...


@asynccontextmanager
async def at_hand(
    lender: PictureLender | None,
    host: str,
    observations: Sequence[Observation],
    indices: Iterable[Tensor],
) -> AsyncIterator[tuple[Observation, ...]]:
    """Yield observations; the shelved pictures of some rows are all on the shelf of a host.

    Args:
        lender: copies those that are not; None if every picture is beside the ranks.
        host: name of the ranks' host; empty for this one.
        observations: of all rows.
        indices: the rows that a rank there will read.
    """
    rows = {row for index in indices for row in index.tolist()} if lender is not None else ()
    away = {
        value
        for row in rows
        for value in observations[row].values()
        if isinstance(value, ShelvedArray) and value.host != host
    }
    if not away or lender is None:
        yield tuple(observations)
        return
    loan = await lender.lend(host, away)
    try:
        found = list(observations)
        for row in rows:
            found[row] = {name: _copy_of(value, loan) for name, value in found[row].items()}
        yield tuple(found)
    finally:
        await lender.take_back(loan)


def _copy_of(value: Any, loan: Loan) -> Any:
    return loan.places.get(value, value) if isinstance(value, ShelvedArray) else value
