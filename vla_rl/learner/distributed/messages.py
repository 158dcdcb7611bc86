"""Messages between the learner and its ranks: what the learner's own classes need to be sent.

Rows, divisors and sums are sent as they are, tensors included. Images lie on the host that recorded them.
Those of rows that a rank of another host will read are copied to that host first (`with_local_images`).
"""

from collections.abc import AsyncIterator, Collection, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final, Protocol

import msgspec
import numpy as np
import torch
from torch import Tensor

from vla_rl.actors import register_extension
from vla_rl.types import ArrayRef, Observation


class ParameterPiece(msgspec.Struct, frozen=True):
    """Some consecutive numbers of a parameter, as bytes of the type that engines act with."""

    name: str
    start: int
    """Index of the first number in the flattened parameter."""

    run: int
    """Numbers that follow each other from there; the next ones begin a row later."""

    data: np.ndarray


def _copy_tensor(array: np.ndarray) -> Tensor:
    # what arrives is read-only, which torch warns about, and its shared memory is needed
    return torch.tensor(array)


TENSOR: Final = 16
"""Extension of the wire: a tensor of the host, with its numbers as an array."""

ARRAY_REF: Final = 17
"""Extension of the wire: an image in the cache of the rank's host, in an observation, whose values have
no types by which a message could tell it from a list."""

register_extension(TENSOR, Tensor, Tensor.numpy, _copy_tensor)
register_extension(
    ARRAY_REF, ArrayRef, msgspec.structs.astuple, lambda content: msgspec.convert(content, ArrayRef)
)


def name_cached_arrays(observation: Observation) -> Observation:
    """Return an observation to be sent: its arrays in a cache are named, and stay in their place."""
    return {
        # msgspec encodes a struct by itself, as a list
        name: msgspec.msgpack.Ext(ARRAY_REF, msgspec.msgpack.encode(value))
        if isinstance(value, ArrayRef)
        else value
        for name, value in observation.items()
    }


def read_observations(observations: Sequence[Observation]) -> tuple[Observation, ...]:
    """Return the observations of a message with arrays of their own.

    Raises: OSError for an array whose cache is gone.
    """
    return tuple(
        {name: _read_array(value) for name, value in each.items()} for each in observations
    )


def _read_array(value: Any) -> Any:
    if isinstance(value, ArrayRef):
        return value.read_array()
    if isinstance(value, dict):  # what the policy drew for a decision
        return {name: _read_array(each) for name, each in value.items()}
    # what arrives is read-only, which torch warns about, and its shared memory is needed
    return value.copy() if isinstance(value, np.ndarray) else value


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
    """Yield observations to be sent; the cached images of some rows are all in the cache of a host.

    Args:
        image_copier: copies those that are not; None if every image is on the ranks' host.
        host: name of the ranks' host; empty for this one.
        observations: of all rows.
        indices: the rows that a rank there will read.
    """
    rows, found = {row for index in indices for row in index.tolist()}, list(observations)
    away = {
        value
        for row in rows
        for value in observations[row].values()
        if isinstance(value, ArrayRef) and value.host != host
    }
    copies = None
    if away and image_copier is not None:
        # all of a rank's rows at once, before its first pass: fetched one by one, each micro-batch
        # would wait for the network
        copies = await image_copier.copy_images(host, away)
        for row in rows:
            found[row] = {name: _find_copy(value, copies) for name, value in found[row].items()}
    try:
        for row in rows:
            found[row] = name_cached_arrays(found[row])
        yield tuple(found)
    finally:
        if copies is not None and image_copier is not None:
            await image_copier.release_images(copies)


def _find_copy(value: Any, copies: CopiedImages) -> Any:
    return copies.by_original.get(value, value) if isinstance(value, ArrayRef) else value
