"""Rows, sums and weights on their way between the learner and its ranks: plain values and arrays."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from vla_rl.algorithms import Denominators
from vla_rl.algorithms.losses import Diagnostics
from vla_rl.learner.decisions import Decisions
from vla_rl.learner.imitation_passes import Lessons
from vla_rl.learner.update_metrics import MicroBatchSums, on_host
from vla_rl.learner.value_passes import ValueRows
from vla_rl.types import Observation, ShelvedArray


class Observed(msgspec.Struct, frozen=True):
    """Observations of some rows. What lies on a shelf beside the rank is named, and None here."""

    here: list[dict[str, Any]]
    shelved: list[dict[str, ShelvedArray]]


class Rows(msgspec.Struct, frozen=True):
    """A micro-batch: what was observed, and its columns by name."""

    observations: Observed
    columns: dict[str, np.ndarray]
    action_tokens: int


class Seen(msgspec.Struct, frozen=True):
    """A micro-batch of a critic: observations, and the values to fit."""

    observations: Observed
    target: np.ndarray
    old: np.ndarray
    is_masked: bool = False
    """Whether the rows only take part, and add exact zeros."""


class Shown(msgspec.Struct, frozen=True):
    """A micro-batch of supervised learning."""

    observations: Observed
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


class Piece(msgspec.Struct, frozen=True):
    """Some consecutive numbers of a parameter, as bytes of the type that engines act with."""

    name: str
    start: int
    """Index of the first number in the flattened parameter."""

    run: int
    """Numbers that follow each other from there; the next ones begin a row later."""

    data: np.ndarray


def pack_rows(rows: Decisions) -> Rows:
    """Return the message of some rows."""
    columns = {name: column.numpy() for name, column in rows.tensors().items()}
    return Rows(pack_observed(rows.observations), columns, rows.action_tokens)


def unpack_rows(message: Rows) -> Decisions:
    """Return the rows of a message.

    They have no places: errors are located where the rows came from.
    """
    columns: Any = {name: torch.tensor(column) for name, column in message.columns.items()}
    observations = unpack_observed(message.observations)
    places = ((),) * len(observations)
    return Decisions(
        observations=observations, places=places, action_tokens=message.action_tokens, **columns
    )


def pack_observed(observations: Sequence[Observation]) -> Observed:
    """Return the message of some observations."""
    shelved = [
        {name: value for name, value in each.items() if isinstance(value, ShelvedArray)}
        for each in observations
    ]
    # None keeps the place: a policy may read its images in their order
    here = [
        {**each, **dict.fromkeys(away)} for each, away in zip(observations, shelved, strict=True)
    ]
    return Observed(here, shelved)


def unpack_observed(message: Observed) -> tuple[Observation, ...]:
    """Return the observations of a message with arrays of their own.

    Raises: OSError for an array on a shelf that is gone.
    """
    return tuple(
        {name: away[name].read() if name in away else _own(value) for name, value in each.items()}
        for each, away in zip(message.here, message.shelved, strict=True)
    )


def _own(value: Any) -> Any:
    # what arrives is read-only, which torch warns about, and its shared memory is needed
    return value.copy() if isinstance(value, np.ndarray) else value


def pack_seen(rows: ValueRows, *, is_masked: bool = False) -> Seen:
    """Return the message of a critic's rows."""
    observations = pack_observed(rows.observations)
    return Seen(observations, rows.target.numpy(), rows.old.numpy(), is_masked)


def unpack_seen(message: Seen) -> ValueRows:
    """Return the critic's rows of a message."""
    observations = unpack_observed(message.observations)
    return ValueRows(observations, torch.tensor(message.target), torch.tensor(message.old))


def pack_lessons(lessons: Lessons, seed: int) -> Shown:
    """Return the message of lessons."""
    observations = pack_observed(lessons.observations)
    return Shown(observations, lessons.tokens.numpy(), lessons.mask.numpy(), seed)


def unpack_lessons(message: Shown) -> Lessons:
    """Return the lessons of a message; they are one micro-batch, whose lengths were used."""
    tokens, mask = torch.tensor(message.tokens), torch.tensor(message.mask)
    lengths = torch.full((len(tokens),), tokens.shape[1])
    return Lessons((), tokens, mask, lengths, lengths)


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
    told = sums.diagnostics
    return Sums(
        numbers={name: float(getattr(sums, name)) for name in _NUMBERS},
        diagnostics={name: float(getattr(told, name)) for name in _DIAGNOSTICS},
        extra={name: float(value) for name, value in told.extra_sums.items()},
        tokens=sums.tokens.numpy(),
    )


def unpack_sums(message: Sums) -> MicroBatchSums:
    """Return the sums of a message."""
    numbers: dict[str, Tensor] = _tensors(message.numbers)
    numbers["first_unsound"] = numbers["first_unsound"].long()
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
