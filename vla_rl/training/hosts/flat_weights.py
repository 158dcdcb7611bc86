"""A policy's trained weights as one row of bytes, and back. No process and no socket."""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
import torch
from torch import Tensor, nn

from vla_rl.errors import CheckpointError
from vla_rl.training.hosts.messages import PIECE_BYTES, WeightHeading
from vla_rl.types import SOLE_MEMBER

ALIGNED: Final = 16
"""Bytes to which the place of each parameter is rounded up, so that any type can be read there."""


@dataclass(frozen=True)
class FlatWeights:
    """One version of a policy's trained weights in the memory of this process."""

    member: str
    """The policy's member name."""

    version: int
    names: tuple[str, ...]
    forms: tuple[str, ...]
    """Type and shape of each parameter."""

    data: np.ndarray
    """uint8 [bytes]."""

    @cached_property
    def heading(self) -> WeightHeading:
        """The heading that a host gets before the bytes. Reads them all: call it in a thread."""
        return WeightHeading(
            member=self.member,
            version=self.version,
            names=self.names,
            forms=self.forms,
            num_bytes=len(self.data),
            digest=_digest(self.data),
        )

    def equals(self, other: "FlatWeights") -> bool:
        """Return whether the bytes are the same. Reads them all: call it in a thread."""
        return self.names == other.names and np.array_equal(self.data, other.data)

    def pieces(self, size: int = PIECE_BYTES) -> Iterator[tuple[int, np.ndarray]]:
        """Yield the bytes in pieces, each with its place."""
        for start in range(0, len(self.data), size):
            yield start, self.data[start : start + size]


def flattened(network: nn.Module, version: int, member: str = SOLE_MEMBER) -> FlatWeights:
    """Copy the trained weights of a network; frozen ones are the same everywhere.

    Call it on the device lane.
    """
    trained = {name: each for name, each in network.named_parameters() if each.requires_grad}
    places, num_bytes = _places(trained.values())
    data = torch.zeros(num_bytes, dtype=torch.uint8)
    for start, each in zip(places, trained.values(), strict=True):
        _part(data, start, each).copy_(each.detach())
    forms = tuple(map(_form, trained.values()))
    return FlatWeights(member, version, tuple(trained), forms, data.numpy())


class IncomingWeights:
    """One version of the weights on its way in: begun, filled piece by piece, checked, applied.

    Args:
        heading: what is to come.
        network: the network that they are for; only `apply` changes it.

    Raises: CheckpointError if they are not weights of this network.
    """

    def __init__(self, heading: WeightHeading, network: nn.Module) -> None:
        self.heading = heading
        self._parameters = _parameters_of(heading, network)
        self._data = np.empty(heading.num_bytes, np.uint8)
        self._num_bytes = 0
        self._is_checked = False

    def put(self, start: int, piece: np.ndarray) -> None:
        """Add the next piece. Raises: CheckpointError if it is not the next one."""
        if start != self._num_bytes or start + len(piece) > len(self._data):
            raise CheckpointError(
                f"piece {start} to {start + len(piece)} of weights {self.heading.version} came, "
                f"expected byte {self._num_bytes} of {len(self._data)} next"
            )
        self._data[start : start + len(piece)] = piece
        self._num_bytes += len(piece)

    def check(self) -> None:
        """Compare all bytes with the digest. Raises: CheckpointError if they differ."""
        if self._num_bytes != len(self._data) or _digest(self._data) != self.heading.digest:
            raise CheckpointError(
                f"weights {self.heading.version} arrived with {self._num_bytes} of "
                f"{len(self._data)} bytes, or with other bytes than were sent"
            )
        self._is_checked = True

    def apply(self) -> None:
        """Write them into the network, on the device lane. Call it after `check`."""
        assert self._is_checked, "unchecked weights must not act"
        data, (places, _) = torch.from_numpy(self._data), _places(self._parameters)
        with torch.no_grad():
            for start, parameter in zip(places, self._parameters, strict=True):
                parameter.copy_(_part(data, start, parameter))


def _parameters_of(heading: WeightHeading, network: nn.Module) -> list[Tensor]:
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


def _form(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"


def _places(parameters: Iterable[Tensor]) -> tuple[list[int], int]:
    """Return where each parameter begins among the bytes, and the number of all bytes."""
    places, end = [], 0
    for each in parameters:
        places.append(end)
        end += -(-each.nbytes // ALIGNED) * ALIGNED
    return places, end


def _part(data: Tensor, start: int, like: Tensor) -> Tensor:
    """Return a part of the bytes as a tensor of the type and shape of another one."""
    return data[start : start + like.nbytes].view(like.dtype).view(like.shape)


def _digest(data: np.ndarray) -> str:
    return hashlib.blake2b(data.data, digest_size=16).hexdigest()
