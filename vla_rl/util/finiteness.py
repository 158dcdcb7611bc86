"""Weights are finite numbers: one check for every family and every way in.

A policy with a NaN among its weights still answers: NaN logits choose the same token again and
again. Whatever reads weights calls `require_finite` before they are used.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from vla_rl.errors import CheckpointError


def is_finite(tensor: Tensor) -> bool:
    """Return whether all numbers are finite, without a copy of the tensor's size: minimum and
    maximum are NaN if any number is.
    """
    if tensor.numel() == 0 or not (tensor.is_floating_point() or tensor.is_complex()):
        return True
    if tensor.is_complex():
        return is_finite(torch.view_as_real(tensor))
    if tensor.element_size() == 1:  # torch has no minimum of 8-bit floats
        tensor = tensor.float()
    return all(bool(torch.isfinite(end)) for end in torch.aminmax(tensor.detach()))


def first_not_finite(tensors: Mapping[str, Tensor]) -> str | None:
    """Return the name of the first tensor with a number that is not finite; None if there is
    none.
    """
    return next((name for name, tensor in tensors.items() if not is_finite(tensor)), None)


def require_finite(tensors: Mapping[str, Tensor], source: object) -> None:
    """Raise CheckpointError naming the first tensor that has a number that is not finite.

    Args:
        tensors: tensors by name.
        source: folder or file that they were read from.
    """
    name = first_not_finite(tensors)
    if name is not None:
        raise CheckpointError(
            f"{name} in {source} has numbers that are not finite; the file is damaged, or what "
            "wrote it had diverged."
        )
