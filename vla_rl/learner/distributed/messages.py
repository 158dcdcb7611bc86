"""Messages between the learner and its ranks: rows, sums, weights, as plain values with arrays.

Images lie on the host that recorded them. Those of rows that a rank of another host will read are copied
to that host first (`with_local_images`).
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, fields
from typing import Any, Final, Protocol, TypeVar

import msgspec
import numpy as np
import torch
from torch import Tensor

from vla_rl.algorithms import Denominators
from vla_rl.algorithms.losses import Diagnostics
from vla_rl.learner.backend import MicroBatchSums, on_host
from vla_rl.learner.critic_backend import ValueRows
from vla_rl.learner.decisions import Decisions
from vla_rl.learner.imitation_backend import SftRows
from vla_rl.types import ArrayRef, Observation


class ObservationBatch(msgspec.Struct, frozen=True):
    """Observations of some rows. An image in the cache of the rank's host is named, and None in `local`."""

    local: list[dict[str, Any]]
    cached: list[dict[str, ArrayRef]]


class Rows(msgspec.Struct, frozen=True):
    """A micro-batch: what was observed, and its columns by name."""

    observations: ObservationBatch
    columns: dict[str, np.ndarray]
    action_tokens: int


class CriticBatch(msgspec.Struct, frozen=True):
    """A micro-batch of a critic: observations, and the values to fit."""

    observations: ObservationBatch
    target: np.ndarray
    old: np.ndarray
    is_masked: bool = False
    """Whether the rows only take part, and add exact zeros."""


class SftBatch(msgspec.Struct, frozen=True):
    """A micro-batch of supervised learning."""

    observations: ObservationBatch
    tokens: np.ndarray
    mask: np.ndarray

    seed: int
    """Seed of what a rank draws for it."""


class Counts(msgspec.Struct, frozen=True):
    """Divisors of the losses of a micro-batch, counted over all ranks."""

    num_tokens: int
    num_sequences: int
    sequence_tokens: np.ndarray
    length: float | None


class Sums(msgspec.Struct, frozen=True):
    """`MicroBatchSums`, by name."""

    numbers: dict[str, float]
    diagnostics: dict[str, float]
    extra: dict[str, float]
    tokens: np.ndarray


class ParameterPiece(msgspec.Struct, frozen=True):
    """Some consecutive numbers of a parameter, as bytes of the type that engines act with."""

    name: str
    start: int
    """Index of the first number in the flattened parameter."""

    run: int
    """Numbers that follow each other from there; the next ones begin a row later."""

    data: np.ndarray


def pack_rows(rows: Decisions) -> Rows:
    """Return the message of some rows."""
    columns = {name: column.numpy() for name, column in rows.named_columns().items()}
    return Rows(pack_observations(rows.observations), columns, rows.action_tokens)


def unpack_rows(message: Rows) -> Decisions:
    """Return the rows of a message.

    They have no slots: errors are located where the rows came from.
    """
    columns: Any = {name: torch.tensor(column) for name, column in message.columns.items()}
    observations = unpack_observations(message.observations)
    slots = ((),) * len(observations)
    return Decisions(
        observations=observations, slots=slots, action_tokens=message.action_tokens, **columns
    )


def pack_observations(observations: Sequence[Observation]) -> ObservationBatch:
    """Return the message of some observations."""
    cached = [
        {name: value for name, value in each.items() if isinstance(value, ArrayRef)}
        for each in observations
    ]
    # None keeps the key: a policy may read its images in their order
    local = [
        {**each, **dict.fromkeys(away)} for each, away in zip(observations, cached, strict=True)
    ]
    return ObservationBatch(local, cached)


def unpack_observations(message: ObservationBatch) -> tuple[Observation, ...]:
    """Return the observations of a message with arrays of their own.

    Raises: OSError for an array whose cache is gone.
    """
    return tuple(
        {
            name: away[name].read_array() if name in away else _copy_array(value)
            for name, value in each.items()
        }
        for each, away in zip(message.local, message.cached, strict=True)
    )


def _copy_array(value: Any) -> Any:
    # what arrives is read-only, which torch warns about, and its shared memory is needed
    return value.copy() if isinstance(value, np.ndarray) else value


def pack_critic_batch(rows: ValueRows, *, is_masked: bool = False) -> CriticBatch:
    """Return the message of a critic's rows."""
    observations = pack_observations(rows.observations)
    return CriticBatch(observations, rows.target.numpy(), rows.old.numpy(), is_masked)


def unpack_critic_batch(message: CriticBatch) -> ValueRows:
    """Return the critic's rows of a message."""
    observations = unpack_observations(message.observations)
    return ValueRows(observations, torch.tensor(message.target), torch.tensor(message.old))


def pack_sft_batch(rows: SftRows, seed: int) -> SftBatch:
    """Return the message of rows."""
    observations = pack_observations(rows.observations)
    return SftBatch(observations, rows.tokens.numpy(), rows.mask.numpy(), seed)


def unpack_sft_batch(message: SftBatch) -> SftRows:
    """Return the rows of a message; they are one micro-batch, whose lengths were used."""
    tokens, mask = torch.tensor(message.tokens), torch.tensor(message.mask)
    lengths = torch.full((len(tokens),), tokens.shape[1])
    return SftRows((), tokens, mask, lengths, lengths)


def pack_counts(counts: Denominators) -> Counts:
    """Return the message of some rows' denominators."""
    numbers = counts.sequence_tokens.numpy()
    return Counts(counts.num_tokens, counts.num_sequences, numbers, counts.length)


def unpack_counts(message: Counts) -> Denominators:
    """Return the denominators of a message."""
    numbers = torch.tensor(message.sequence_tokens)
    return Denominators(message.num_tokens, message.num_sequences, numbers, message.length)


def pack_sums(sums: MicroBatchSums) -> Sums:
    """Return the message of a micro-batch's sums; this waits for the device."""
    (sums,), _ = on_host([sums])
    diagnostics = sums.diagnostics
    return Sums(
        numbers={name: float(getattr(sums, name)) for name in _NUMBERS},
        diagnostics={name: float(getattr(diagnostics, name)) for name in _DIAGNOSTICS},
        extra={name: float(value) for name, value in diagnostics.extra_sums.items()},
        tokens=sums.tokens.numpy(),
    )


def unpack_sums(message: Sums) -> MicroBatchSums:
    """Return the sums of a message."""
    numbers: dict[str, Tensor] = _tensors(message.numbers)
    numbers["first_nonfinite"] = numbers["first_nonfinite"].long()
    extra = _tensors(message.extra)
    return MicroBatchSums(
        diagnostics=Diagnostics(**_tensors(message.diagnostics), extra_sums=extra),
        tokens=torch.tensor(message.tokens),
        **numbers,
    )


def _tensors(numbers: dict[str, float]) -> dict[str, Tensor]:
    # float64 holds every float32 sum and every count of tokens exactly
    return {name: torch.tensor(value, dtype=torch.float64) for name, value in numbers.items()}


_NUMBERS = tuple(
    each.name for each in fields(MicroBatchSums) if each.name not in ("diagnostics", "tokens")
)
_DIAGNOSTICS = tuple(each.name for each in fields(Diagnostics) if each.name != "extra_sums")


S = TypeVar("S")
T = TypeVar("T")

IN_FLIGHT: Final = 2
"""Micro-batches that a rank has at a time: one is computed, the next is prepared."""


async def in_order(call: Callable[[S], Awaitable[T]], inputs: Iterable[S]) -> list[T]:
    """Make a call for each input, in order and a few at a time."""
    # two: with one, a rank would wait for its next rows; with all of them, their images would fill
    # the memory of its host
    free = asyncio.Semaphore(IN_FLIGHT)

    async def one(value: S) -> T:
        async with free:
            return await call(value)

    return await asyncio.gather(*(one(value) for value in inputs))


def idle_row(num_input_tokens: Tensor) -> Tensor:
    """Return the shortest row, for passes of ranks that have no row of their own."""
    # the cheapest one: it is computed for nothing but its part in a collective
    return num_input_tokens.argmin()[None]


@dataclass(frozen=True)
class CopiedImages:
    """Copies of images in the cache of a host."""

    host: str
    keys: tuple[int, ...]
    """Memories there that hold them."""

    by_original: dict[ArrayRef, ArrayRef]
    """The copy of each."""


class ImageCopier(Protocol):
    """Copies images from the cache of one host to another's."""

    async def copy_images(self, host: str, images: Collection[ArrayRef]) -> CopiedImages:
        """Copy images to the cache of `host`. Raises: RankFailed if that cannot be."""
        ...

    async def release_images(self, copies: CopiedImages) -> None:
        """Note that the copies were read, so that they may be freed."""
        ...


@asynccontextmanager
async def with_local_images(
    image_copier: ImageCopier | None,
    host: str,
    observations: Sequence[Observation],
    indices: Iterable[Tensor],
) -> AsyncIterator[tuple[Observation, ...]]:
    """Yield observations; the cached images of some rows are all in the cache of a host.

    Args:
        image_copier: copies those that are not; None if every image is on the ranks' host.
        host: name of the ranks' host; empty for this one.
        observations: of all rows.
        indices: the rows that a rank there will read.
    """
    rows = {row for index in indices for row in index.tolist()} if image_copier is not None else ()
    away = {
        value
        for row in rows
        for value in observations[row].values()
        if isinstance(value, ArrayRef) and value.host != host
    }
    if not away or image_copier is None:
        yield tuple(observations)
        return
    # all of a rank's rows at once, before its first pass: fetched one by one, each micro-batch
    # would wait for the network
    copies = await image_copier.copy_images(host, away)
    try:
        found = list(observations)
        for row in rows:
            found[row] = {name: _find_copy(value, copies) for name, value in found[row].items()}
        yield tuple(found)
    finally:
        await image_copier.release_images(copies)


def _find_copy(value: Any, copies: CopiedImages) -> Any:
    return copies.by_original.get(value, value) if isinstance(value, ArrayRef) else value
