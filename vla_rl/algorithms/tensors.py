"""Tensors of losses: torch, imported when a function first uses it.

Losses are declared beside their functions, and configurations read the declarations. A simulator
process reads configurations too, and torch would cost each of them hundreds of megabytes.

`Tensor` is for annotations; write `torch.Tensor` to check an instance.
"""

from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

__all__ = ["Tensor", "torch"]


if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    Tensor = Any

    class _Torch:
        def __getattr__(self, name: str) -> Any:
            found = getattr(import_module("torch"), name)
            setattr(self, name, found)  # losses run once per micro-batch: look it up once
            return found

    torch = _Torch()


def full_precision(tensor: Tensor) -> Tensor:
    """Convert bfloat16 and float16 to float32, with the gradient; return other tensors unchanged.

    A ratio of bfloat16 log-probs has 8 bits, with which 1.0004, where GSPO clips, is 1. Converting
    does not restore rounded digits, so compute log-probs from float32 logits.
    """
    # float64 stays: tests compare gradients with finite differences, which need its digits
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def entropy(logits: Tensor) -> Tensor:
    """Compute H = -sum_v p_v log p_v of softmax(logits) over the last axis.

    Args:
        logits: float [..., V], after temperature; -inf marks an impossible action and adds 0.

    Returns: float32 [...], of float64 logits float64, in [0, log V], with a gradient.
    """
    log_probs = torch.log_softmax(full_precision(logits), dim=-1)
    # 0 * log 0 is 0 in the limit; replacing -inf first keeps NaN out of value and gradient
    finite = torch.where(log_probs == -torch.inf, 0.0, log_probs)
    return -(log_probs.exp() * finite).sum(dim=-1)


def require_shape(name: str, tensor: Tensor, shape: Sequence[int | None], axes: str) -> None:
    """Refuse a tensor of another shape, which broadcasting would let pass as another loss.

    Args:
        name: the argument, for the error.
        tensor: what was given.
        shape: its expected lengths; None takes any.
        axes: how the docstring writes the shape, such as "[B, A]".

    Raises: ValueError.
    """
    lengths = tuple(tensor.shape)
    if len(lengths) != len(shape) or any(
        wanted not in (None, found) for found, wanted in zip(lengths, shape, strict=True)
    ):
        expected = ", ".join("any" if length is None else str(length) for length in shape)
        raise ValueError(f"{name} is {list(lengths)}, expected {axes} = [{expected}].")
