"""Weights that several processes hold in shares, and engines on other hosts that take them from there.

    share 0 ─┐ one link each   ┌──────────────────────────────────────────────────┐
    share 1 ─┼────────────────►│ row of bytes: every parameter at its place       │ ─► neighbours
    share 2 ─┘                 └──────────────────────────────────────────────────┘

A share is sent in pieces, in rising order of their places, so that the beginning of the row is whole
long before its end. Both sides compute the digest of a share from its pieces.
"""

import asyncio
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, Protocol, TypeAlias, runtime_checkable

import msgspec
import numpy as np
from torch import nn

SHARE_PIECES_AHEAD: Final = 4
"""Pieces of a share that are sent before the host has asked for more."""

RowPart: TypeAlias = tuple[int, int, int, np.ndarray]
"""Place of the first byte in the row, bytes that follow each other, distance between the beginnings of
two such runs, and the bytes."""


class SharePlace(msgspec.Struct, frozen=True, array_like=True):
    """The place of some bytes in the row."""

    at: int
    """Place of the first one."""

    run: int
    """Bytes that follow each other."""

    distance: int
    """Distance between the beginnings of two such runs."""

    num_bytes: int


class SharePiece(msgspec.Struct, frozen=True):
    """Bytes of a share: parts of one parameter or of several."""

    places: list[SharePlace]
    """Places of the parts, in the order of their bytes."""

    next_at: int
    """Place of the first byte of the next piece; the end of the row after the last one. All bytes of
    this share below it have been sent."""

    data: np.ndarray
    """uint8 [bytes]."""


class WeightShare(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a version that one process holds."""

    holder: int
    """Number of the process."""

    host: str = ""
    """Name of its host; empty for that of the control process."""

    state: int
    """Number of changes of its weights up to this version."""

    num_bytes: int
    digest: str


class ShareDoor(msgspec.Struct, frozen=True, kw_only=True):
    """The place at which a host takes one share."""

    address: str
    """Such as `tcp://10.0.0.2:7101`."""

    public_key: str


class ShareHolders(Protocol):
    """The processes that hold the newest weights of a policy.

    Attributes:
        turn: lock; hold it from `new_links` until `give` has returned, so that no host waits at open
            doors for processes that compute something else.
    """

    turn: asyncio.Lock

    async def shares(self, begins: Mapping[str, int], row_bytes: int) -> list[WeightShare]:
        """Return what each process holds now, without those that hold nothing.

        Args:
            begins: byte of the row at which each trained parameter begins.
            row_bytes: bytes of the row.
        """
        ...

    async def new_links(self, shares: Sequence[WeightShare]) -> list[str]:
        """Return the public keys with which the holders of these shares will connect to a host."""
        ...

    async def give(
        self, shares: Sequence[WeightShare], links: Sequence[str], doors: Sequence[ShareDoor]
    ) -> None:
        """Send each share to its door, and return once the host has closed all doors.

        Args:
            shares: what to send.
            links: what `new_links` returned for them.
            doors: where the host takes them.

        Raises: WeightsNotGiven if a host cannot be reached, or the weights have changed; RankFailed
            if a process is gone.
        """
        ...


@runtime_checkable
class ShareSink(Protocol):
    """Engines on other hosts, which take weights from the processes that hold them."""

    async def take_shares(
        self, holders: ShareHolders, network: nn.Module, weight_version: int, *, is_current: bool
    ) -> None:
        """Let all hosts take a version; then all apply it.

        Args:
            holders: processes that hold it.
            network: the policy's network, for names and shapes.
            weight_version: number of the version.
            is_current: whether `network` has these weights too.

        Raises: WeightsNotGiven if the hosts cannot take it so; what `holders` raise.
        """
        ...


def share_pieces(parts: Iterable[RowPart], num_bytes: int, row_bytes: int) -> Iterator[SharePiece]:
    """Yield the parts of a share in pieces of about `num_bytes`, or of one part if that is larger.

    Args:
        parts: in rising order of their places.
        num_bytes: size of a piece.
        row_bytes: bytes of the row.
    """
    gathered: list[RowPart] = []
    size = 0
    for part in parts:
        if gathered and size + len(part[3]) > num_bytes:
            yield _piece(gathered, part[0])
            gathered, size = [], 0
        gathered.append(part)
        size += len(part[3])
    if gathered:
        yield _piece(gathered, row_bytes)


class ShareDigest:
    """Digest of a share, from its pieces: their bytes and their places."""

    def __init__(self) -> None:
        self._digest = hashlib.blake2b(digest_size=16)
        self.num_bytes = 0

    def add(self, piece: SharePiece) -> None:
        """Add the next piece."""
        self._digest.update(msgspec.msgpack.encode((piece.places, piece.next_at)))
        self._digest.update(piece.data.data)
        self.num_bytes += len(piece.data)

    @property
    def digest(self) -> str:
        """BLAKE2b in hexadecimal digits."""
        return self._digest.hexdigest()


def _piece(parts: Sequence[RowPart], next_at: int) -> SharePiece:
    places = [SharePlace(at, run, distance, len(data)) for at, run, distance, data in parts]
    data = parts[0][3] if len(parts) == 1 else np.concatenate([part[3] for part in parts])
    return SharePiece(places, next_at, data)
