"""Weights that several learner processes hold in shards, on their way to engines.

    on this host     ranks write into memory that engines open: `SharedWeightSink`
    on other hosts   shard 0 ─┐ one link each   ┌──────────────────────────────────────────────────┐
                     shard 1 ─┼────────────────►│ row of bytes: every parameter at its offset      │ ─► peers
                     shard 2 ─┘                 └──────────────────────────────────────────────────┘

A shard is sent in pieces, in rising order of their offsets, so that the beginning of the row is complete
long before its end. Both sides compute the digest of a shard from its pieces.
"""

import asyncio
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, Protocol, TypeAlias, runtime_checkable

import msgspec
import numpy as np
from torch import Tensor, nn


class SharedParameters(msgspec.Struct, frozen=True):
    """Memory behind a path, and where each trained parameter begins in it."""

    path: str

    begins: dict[str, list[int]]
    """Bytes at which copies of a parameter begin, by its name in the network; most have one."""


@runtime_checkable
class SharedWeightSink(Protocol):
    """An engine in other processes whose next weights can be written by several processes."""

    def stage_shared(self, network: nn.Module, weight_version: int) -> SharedParameters | None:
        """Open memory for a version, and write everything that is not trained, on the device lane.

        Return where the trained parameters of `network` go; None if they cannot be written so.
        """
        ...

    def apply_shared(self, weight_version: int) -> None:
        """Apply the version that was written, on the device lane."""
        ...


def find_trained_offsets(
    network: nn.Module, tensors: Mapping[str, Tensor], offsets: Mapping[str, int]
) -> dict[str, list[int]] | None:
    """Return where each trained parameter begins; None if one has no place of its own.

    An adapter has none, because it is merged into other weights, nor has one that is cut up.

    Args:
        network: the policy's network.
        tensors: what engines read, views of the parameters or computed from them.
        offsets: byte of each of these tensors in the memory.
    """
    trained = {name: each for name, each in network.named_parameters() if each.requires_grad}
    # By address and not by name: engines know tensors by the names of their checkpoint format, and
    # a view of a parameter under another name is the parameter.
    named = {_address(each): name for name, each in trained.items()}
    storages = {each.untyped_storage().data_ptr() for each in trained.values()}
    runs: dict[str, list[int]] = {}
    for name, tensor in tensors.items():
        parameter = named.get(_address(tensor))
        if parameter is not None:
            runs.setdefault(parameter, []).append(offsets[name])
        elif tensor.untyped_storage().data_ptr() in storages:
            return None
    return runs if runs.keys() == trained.keys() else None


def _address(tensor: Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype


SHARD_PIECES_AHEAD: Final = 4
"""Pieces of a shard that are sent before the host has asked for more."""

RowPart: TypeAlias = tuple[int, int, int, np.ndarray]
"""Place of the first byte in the row, bytes that follow each other, distance between the beginnings of
two such runs, and the bytes."""


class ByteRuns(msgspec.Struct, frozen=True, array_like=True):
    """The place of some bytes in the row."""

    at: int
    """Place of the first one."""

    run: int
    """Bytes that follow each other."""

    distance: int
    """Distance between the beginnings of two such runs."""

    num_bytes: int


class ShardPiece(msgspec.Struct, frozen=True):
    """Bytes of a shard: parts of one parameter or of several."""

    runs: list[ByteRuns]
    """Places of the parts, in the order of their bytes."""

    next_at: int
    """Place of the first byte of the next piece; the end of the row after the last one. All bytes of
    this shard below it have been sent."""

    data: np.ndarray
    """uint8 [bytes]."""


class WeightShard(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a version that one process holds."""

    holder: int
    """Number of the process."""

    host: str = ""
    """Name of its host; empty for that of the control process."""

    state: int
    """Number of changes of its weights up to this version."""

    num_bytes: int
    digest: str


class ShardSocket(msgspec.Struct, frozen=True, kw_only=True):
    """The place at which a host takes one shard."""

    address: str
    """Such as `tcp://10.0.0.2:7101`."""

    public_key: str


class ShardHolders(Protocol):
    """The processes that hold the newest weights of a policy.

    Attributes:
        turn: lock; hold it from `new_links` until `send_shards` has returned, so that no host waits at open
            sockets for processes that compute something else.
    """

    turn: asyncio.Lock

    async def describe_shards(self, begins: Mapping[str, int], row_bytes: int) -> list[WeightShard]:
        """Return what each process holds now, without those that hold nothing.

        Args:
            begins: byte of the row at which each trained parameter begins.
            row_bytes: bytes of the row.
        """
        ...

    async def new_links(self, shards: Sequence[WeightShard]) -> list[str]:
        """Return the public keys with which the holders of these shards will connect to a host."""
        ...

    async def send_shards(
        self, shards: Sequence[WeightShard], links: Sequence[str], sockets: Sequence[ShardSocket]
    ) -> None:
        """Send each shard to its socket, and return once the host has closed all sockets.

        Args:
            shards: what to send.
            links: what `new_links` returned for them.
            sockets: where the host receives them.

        Raises: WeightsNotGiven if a host cannot be reached, or the weights have changed; RankFailed
            if a process is gone.
        """
        ...


@runtime_checkable
class ShardSink(Protocol):
    """Engines on other hosts, which take weights from the processes that hold them."""

    async def receive_shards(
        self, holders: ShardHolders, network: nn.Module, weight_version: int, *, is_current: bool
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


def split_shard(parts: Iterable[RowPart], num_bytes: int, row_bytes: int) -> Iterator[ShardPiece]:
    """Yield the parts of a shard in pieces of about `num_bytes`, or of one part if that is larger.

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


class ShardDigest:
    """Digest of a shard, from its pieces: their bytes and their places."""

    def __init__(self) -> None:
        self._digest = hashlib.blake2b(digest_size=16)
        self.num_bytes = 0

    def add_piece(self, piece: ShardPiece) -> None:
        """Add the next piece."""
        # The places too: right bytes at a wrong place would otherwise pass.
        self._digest.update(msgspec.msgpack.encode((piece.runs, piece.next_at)))
        self._digest.update(piece.data.data)
        self.num_bytes += len(piece.data)

    @property
    def digest(self) -> str:
        """BLAKE2b in hexadecimal digits."""
        return self._digest.hexdigest()


def _piece(parts: Sequence[RowPart], next_at: int) -> ShardPiece:
    runs = [ByteRuns(at, run, distance, len(data)) for at, run, distance, data in parts]
    data = parts[0][3] if len(parts) == 1 else np.concatenate([part[3] for part in parts])
    return ShardPiece(runs, next_at, data)
