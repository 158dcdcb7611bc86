"""Messages between the control process and a rollout host: plain values, never code."""

import asyncio
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import msgspec
import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided
from torch import Tensor, nn

from vla_rl.engines.vllm.staging import HostBuffer, HostMemory, open_memory
from vla_rl.engines.weight_shards import ShardPiece
from vla_rl.errors import CheckpointError
from vla_rl.types import SOLE_MEMBER
from vla_rl.util.tasks import run_in_thread

WEIGHT_PIECE_BYTES: Final = 2 << 20
"""Bytes of weights in one message. A host passes a piece on once it has all of it, so that each host
of a chain is later by one piece than the one before."""


class WeightHeading(msgspec.Struct, frozen=True, kw_only=True):
    """A version of one policy's trained weights, before its bytes."""

    member: str
    """The policy's member name."""

    version: int
    names: tuple[str, ...]
    """Parameters in the order of their bytes."""

    forms: tuple[str, ...]
    """Type and shape of each, such as `torch.bfloat16 [32, 64]`."""

    num_bytes: int


class HeldVersion(msgspec.Struct, frozen=True, kw_only=True):
    """The weights with which a host acts for one policy."""

    version: int
    digest: str = ""
    """Digest of the trained weights; empty while they are those of the policy's files."""


ALIGNED: Final = 16
"""Bytes to which the place of each parameter is rounded up, so that any type can be read there."""


@dataclass(frozen=True)
class FlatWeights:
    """One version of a policy's trained weights in the memory of this process."""

    heading: WeightHeading
    """Heading that a host gets before the bytes."""

    data: np.ndarray
    """uint8 [bytes]."""

    @cached_property
    def digest(self) -> str:
        """BLAKE2b of all bytes, in hexadecimal digits. Reads them all: call it in a thread."""
        return hashlib.blake2b(self.data.data, digest_size=16).hexdigest()

    def equals(self, other: "FlatWeights") -> bool:
        """Return whether the bytes are the same. Reads them all: call it in a thread."""
        return self.heading.names == other.heading.names and np.array_equal(self.data, other.data)

    def pieces(
        self, first: int = 0, size: int = WEIGHT_PIECE_BYTES
    ) -> Iterator[tuple[int, np.ndarray]]:
        """Yield the bytes from `first` on in pieces, each with its place."""
        for start in range(first, len(self.data), size):
            yield start, self.data[start : start + size]


def flatten_weights(network: nn.Module, version: int, member: str = SOLE_MEMBER) -> FlatWeights:
    """Copy the trained weights of a network; frozen ones are the same everywhere.

    Call it on the device lane.
    """
    trained = _trained_parameters(network)
    offsets, num_bytes = _offsets(trained.values())
    data = torch.zeros(num_bytes, dtype=torch.uint8)
    for start, each in zip(offsets, trained.values(), strict=True):
        _view_part(data, start, each).copy_(each.detach())
    return FlatWeights(make_heading(network, version, member), data.numpy())


class IncomingWeights:
    """One version of the weights on its way in: begun, filled piece by piece, checked, applied.

    Its bytes are in memory that other processes of this host can open. They stay there until the
    next version comes, for peers that want them later.

    Args:
        heading: what is to come.
        network: the network that they are for; only `apply` changes it.
        memory: memory to use again, of an earlier version; None for new memory.

    Raises: CheckpointError if they are not weights of this network.
    """

    def __init__(
        self, heading: WeightHeading, network: nn.Module, memory: HostBuffer | None = None
    ) -> None:
        self.heading = heading
        self._parameters = _match_parameters(heading, network)
        if memory is None or len(memory.whole) != heading.num_bytes:
            memory = HostBuffer(max(heading.num_bytes, 1))
        self.memory = memory
        self._data = memory.whole.numpy()[: heading.num_bytes]
        self._digest, self._reading = hashlib.blake2b(digest_size=16), asyncio.Lock()
        self.num_received = self._num_read = 0
        """Bytes that have come, from the first one on."""

        self._is_checked = False

    def put(self, start: int, piece: np.ndarray) -> None:
        """Add the next piece. Raises: CheckpointError if it is not the next one."""
        if piece.dtype != np.uint8 or piece.ndim != 1 or not len(piece):
            raise CheckpointError(
                f"a piece of weights {self.heading.version} is {piece.dtype} {list(piece.shape)}, "
                "expected uint8 [bytes]"
            )
        # The bytes say nothing of what they are: a piece at a wrong offset would become other weights,
        # and only the digest of the whole version would tell.
        if start != self.num_received or start + len(piece) > len(self._data):
            raise CheckpointError(
                f"piece {start} to {start + len(piece)} of weights {self.heading.version} came, "
                f"expected byte {self.num_received} of {len(self._data)} next"
            )
        self._data[start : start + len(piece)] = piece
        self.num_received += len(piece)

    def write_piece(self, piece: ShardPiece) -> None:
        """Write a piece of a shard; in any thread. Raises: CheckpointError if it does not fit."""
        end = 0
        for at, run, distance, num_bytes in map(msgspec.structs.astuple, piece.runs):
            data, end = piece.data[end : end + num_bytes], end + num_bytes
            if not _fits(at, run, distance, num_bytes, len(self._data)) or (
                data.dtype != np.uint8 or data.shape != (num_bytes,)
            ):
                raise CheckpointError(
                    f"{num_bytes} bytes at {at} of weights {self.heading.version}, {run} in a row and "
                    f"{distance} from one to the next, do not fit in {len(self._data)} bytes"
                )
            # `as_strided` checks no bounds, and a rank's offsets come from another process: what
            # `_fits` lets through is written as it is.
            num_runs = num_bytes // run
            shape, steps = (num_runs, run), (distance, 1)
            as_strided(self._data[at:], shape, steps)[:] = data.reshape(shape)

    def advance(self, num_received: int) -> None:
        """Note that all bytes below this place have come in shards."""
        self.num_received = max(self.num_received, num_received)

    async def accept(self, num_pieces: int) -> str:
        """Accept shards whose digests were compared; return the digest of all bytes.

        Raises: CheckpointError unless they are as many as the parameters have.
        """
        await self.read_on()
        expected = sum(each.nbytes for each in self._parameters)
        if (num_pieces, self.num_received) != (expected, len(self._data)):
            raise CheckpointError(
                f"{num_pieces} bytes of weights {self.heading.version} came in shards, expected "
                f"{expected}"
            )
        self._is_checked = True
        return self.digest

    def piece(self, start: int, num_bytes: int) -> np.ndarray:
        """Return bytes that have come, uint8 [at most num_bytes]."""
        return self._data[start : min(start + num_bytes, self.num_received)]

    async def read_on(self) -> None:
        """Compute the digest of what has come, in a thread, beside the pieces on their way."""
        # one thread at a time, to its end: also that of a receiver that is cancelled meanwhile
        async with self._reading:
            await run_in_thread(self._read_on)

    async def check(self, digest: str) -> None:
        """Compare all bytes with their digest. Raises: CheckpointError if they differ."""
        await self.read_on()
        if self.num_received != len(self._data) or self._digest.hexdigest() != digest:
            raise CheckpointError(
                f"weights {self.heading.version} arrived with {self.num_received} of "
                f"{len(self._data)} bytes, or with other bytes than were sent"
            )
        self._is_checked = True

    def write_to_network(self) -> None:
        """Write them into the network, on the device lane. Call it after `check`."""
        assert self._is_checked, "unchecked weights must not act"
        _write_into(self._parameters, self._data)

    @property
    def digest(self) -> str:
        """Digest of the bytes that were read."""
        return self._digest.hexdigest()

    def _read_on(self) -> None:
        end = self.num_received
        self._digest.update(self._data[self._num_read : end].data)
        self._num_read = end


class OpenedWeights:
    """One version in the memory of another process of this host, which has checked it.

    Args: as for `IncomingWeights`; `memory`, where that process has them; `digest`, that of them.

    Raises: CheckpointError if they are not weights of this network, or cannot be opened.
    """

    def __init__(
        self, heading: WeightHeading, network: nn.Module, memory: HostMemory, digest: str
    ) -> None:
        self.heading, self.digest = heading, digest
        self._parameters = _match_parameters(heading, network)
        self._data = open_memory(memory).numpy()[: heading.num_bytes]

    def write_to_network(self) -> None:
        """Write them into the network, on the device lane."""
        _write_into(self._parameters, self._data)


def row_layout(network: nn.Module) -> tuple[dict[str, int], int]:
    """Return where each trained parameter begins in the row of bytes, and the length of the row."""
    trained = _trained_parameters(network)
    offsets, num_bytes = _offsets(trained.values())
    return dict(zip(trained, offsets, strict=True)), num_bytes


def make_heading(network: nn.Module, version: int, member: str) -> WeightHeading:
    """Return the heading of a version of a network's trained weights."""
    trained = _trained_parameters(network)
    return WeightHeading(
        member=member,
        version=version,
        names=tuple(trained),
        forms=tuple(map(_form, trained.values())),
        num_bytes=_offsets(trained.values())[1],
    )


def weights_digest(network: nn.Module) -> str:
    """Return the digest of a network's trained weights, without a copy of all of them."""
    trained, digest, end = _trained_parameters(network).values(), hashlib.blake2b(digest_size=16), 0
    offsets, num_bytes = _offsets(trained)
    for start, each in zip(offsets, trained, strict=True):
        digest.update(bytes(start - end))  # what rounding up leaves free
        data = each.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
        digest.update(data.data)
        end = start + each.nbytes
    digest.update(bytes(num_bytes - end))
    return digest.hexdigest()


def _write_into(parameters: Sequence[Tensor], data: np.ndarray) -> None:
    """Copy the bytes, uint8 [bytes], into parameters in their order."""
    row, (offsets, _) = torch.from_numpy(data), _offsets(parameters)
    with torch.no_grad():
        for start, parameter in zip(offsets, parameters, strict=True):
            parameter.copy_(_view_part(row, start, parameter))


def _match_parameters(heading: WeightHeading, network: nn.Module) -> list[Tensor]:
    # Compared before the first byte is asked for, as a version may take minutes on its way.
    named: dict[str, Tensor] = dict(network.named_parameters())
    missing = [name for name in heading.names if name not in named]
    if missing:
        raise CheckpointError(
            f"weights {heading.version} have {missing[0]!r}, which the policy on this host lacks "
            f"({len(missing)} such parameters); expected the same policy on all hosts"
        )
    for name, form in zip(heading.names, heading.forms, strict=True):
        if _form(named[name]) != form:
            raise CheckpointError(
                f"parameter {name!r} of weights {heading.version} is {form}, and "
                f"{_form(named[name])} on this host; expected the same policy on all hosts"
            )
    return [named[name] for name in heading.names]


def _trained_parameters(network: nn.Module) -> dict[str, Tensor]:
    return {name: each for name, each in network.named_parameters() if each.requires_grad}


def _fits(at: int, run: int, distance: int, num_bytes: int, row_bytes: int) -> bool:
    if at < 0 or run < 1 or num_bytes < 1 or num_bytes % run:
        return False
    num_runs = num_bytes // run
    return (num_runs == 1 or distance >= run) and at + (num_runs - 1) * distance + run <= row_bytes


def _form(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"


def _offsets(parameters: Iterable[Tensor]) -> tuple[list[int], int]:
    """Return where each parameter begins among the bytes, and the number of all bytes."""
    offsets, end = [], 0
    for each in parameters:
        offsets.append(end)
        end += -(-each.nbytes // ALIGNED) * ALIGNED
    return offsets, end


def _view_part(data: Tensor, start: int, like: Tensor) -> Tensor:
    """Return a part of the bytes as a tensor of the type and shape of another one."""
    return data[start : start + like.nbytes].view(like.dtype).view(like.shape)
