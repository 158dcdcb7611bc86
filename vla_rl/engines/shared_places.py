"""Places of trained parameters in memory that several processes open: ranks write, engines read."""

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import msgspec
from torch import Tensor, nn


class SharedPlaces(msgspec.Struct, frozen=True):
    """Memory behind a path, and where each trained parameter begins in it."""

    path: str

    begins: dict[str, list[int]]
    """Bytes at which copies of a parameter begin, by its name in the network; most have one."""


@runtime_checkable
class SharedSink(Protocol):
    """An engine in other processes whose next weights can be written by several processes."""

    def share(self, network: nn.Module, weight_version: int) -> SharedPlaces | None:
        """Open memory for a version, and write everything that is not trained, on the device lane.

        Return where the trained parameters of `network` go; None if they cannot be written so.
        """
        ...

    def adopt_shared(self, weight_version: int) -> None:
        """Apply the version that was written, on the device lane."""
        ...


def places_of_trained(
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
    named = {_address(each): name for name, each in trained.items()}
    storages = {each.untyped_storage().data_ptr() for each in trained.values()}
    places: dict[str, list[int]] = {}
    for name, tensor in tensors.items():
        parameter = named.get(_address(tensor))
        if parameter is not None:
            places.setdefault(parameter, []).append(offsets[name])
        elif tensor.untyped_storage().data_ptr() in storages:
            return None
    return places if places.keys() == trained.keys() else None


def _address(tensor: Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype
