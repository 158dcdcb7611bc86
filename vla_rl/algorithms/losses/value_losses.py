"""The critic's loss, and the share of the returns' variance that it explains."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from vla_rl.algorithms.losses.config import ValueLossConfig
from vla_rl.algorithms.tensors import Tensor, full_precision, torch


@dataclass(frozen=True)
class ValueDiagnostics:
    """Sums over unmasked entries, float64 [] tensors; `a + b` combines micro-batches exactly."""

    num_values: Tensor
    num_clipped: Tensor
    value_sum: Tensor
    return_sum: Tensor
    return_square_sum: Tensor
    error_sum: Tensor
    error_square_sum: Tensor

    def __add__(self, other: "ValueDiagnostics") -> "ValueDiagnostics":
        """Combine the diagnostics of two micro-batches."""
        return ValueDiagnostics(
            **{
                name: getattr(self, name) + getattr(other, name)
                for name in self.__dataclass_fields__
            }
        )

    def metrics(self) -> dict[str, float]:
        """Return the metrics by name; empty if everything was masked.

        They are `value_mean`, `return_mean`, `value_clip_fraction` and `explained_variance` = 1 -
        var(R - V) / var(R), which is left out if all returns R are equal.
        """
        num = float(self.num_values)
        if num == 0.0:
            return {}
        metrics = {
            "value_mean": float(self.value_sum) / num,
            "return_mean": float(self.return_sum) / num,
            "value_clip_fraction": float(self.num_clipped) / num,
        }
        variance = _variance(num, float(self.return_sum), float(self.return_square_sum))
        # equal returns have no variance to explain, but for a rounding that would be reported as
        # minus thousands
        if variance > 1e-12 * max(float(self.return_square_sum) / num, 1e-12):
            left = _variance(num, float(self.error_sum), float(self.error_square_sum))
            metrics["explained_variance"] = 1.0 - left / variance
        return metrics


ValueLoss: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, ValueDiagnostics]]
"""Function from (values, old_values, returns, mask) to (losses [B, T], diagnostics)."""


def value_loss(config: ValueLossConfig) -> ValueLoss:
    """Return the critic's loss that a config describes."""

    def loss(
        values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor
    ) -> tuple[Tensor, ValueDiagnostics]:
        return clipped_value_loss(
            values, old_values, returns, mask, clip=config.clip, huber_delta=config.huber_delta
        )

    return loss


def clipped_value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    *,
    clip: float | None = None,
    huber_delta: float | None = None,
) -> tuple[Tensor, ValueDiagnostics]:
    """Compute PPO's value loss.

    It is the larger of the error and the error of the value clipped around its old one.

        e(v) = (v - R)^2 / 2,  or Huber: e(v) = (v - R)^2 / 2 where |v - R| <= delta, else delta * (|v - R| - delta / 2)
        loss = max(e(V), e(clamp(V, V_old - clip, V_old + clip)))

    As in the code of Schulman et al. 2017 (arXiv:1707.06347); the Huber form is RLinf's. The factor
    1/2 is part of the loss.

    Args:
        values: float [B, T] or any other shape, the only input with a gradient.
        old_values: the same shape, values with which the advantages were computed; not read if
            `clip` is None.
        returns: the same shape, the targets: advantage before whitening + old value.
        mask: bool, the same shape.
        clip: half-width of the interval around the old value; None turns clipping off.
        huber_delta: error above which the loss is linear; None always squares.

    Returns: losses of that shape with exact zeros where masked, and diagnostics. Raises: ValueError
    for shapes that differ.
    """
    for name, tensor in (("old_values", old_values), ("returns", returns), ("mask", mask)):
        if tensor.shape != values.shape:
            raise ValueError(
                f"{name} is {list(tensor.shape)}, expected {list(values.shape)} like values."
            )
    # a critic of one's own may give bfloat16, in which a value of 100.25 is 100
    values = torch.where(mask, full_precision(values), 0.0)
    targets = torch.where(mask, full_precision(returns), 0.0).detach()
    losses = _error(values - targets, huber_delta)
    clipped = torch.zeros_like(mask)
    if clip is not None:
        old = torch.where(mask, full_precision(old_values), 0.0).detach()
        near = torch.maximum(torch.minimum(values, old + clip), old - clip)
        held = _error(near - targets, huber_delta)
        # counted where the clip decides, as verl does: a value that moved far towards its return is
        # not held back
        clipped = (held > losses).detach()
        losses = torch.maximum(losses, held)
    return torch.where(mask, losses, 0.0), _diagnostics(values.detach(), targets, mask, clipped)


def _error(difference: Tensor, huber_delta: float | None) -> Tensor:
    square = 0.5 * difference.square()
    if huber_delta is None:
        return square
    size = difference.abs()
    return torch.where(size <= huber_delta, square, huber_delta * (size - 0.5 * huber_delta))


def _diagnostics(
    values: Tensor, returns: Tensor, mask: Tensor, clipped: Tensor
) -> ValueDiagnostics:
    # float64: a variance is the difference of two large sums, which float32 can turn negative
    weight, values, returns = mask.double(), values.double(), returns.double()
    errors = (returns - values) * weight
    return ValueDiagnostics(
        num_values=weight.sum(),
        num_clipped=(clipped & mask).double().sum(),
        value_sum=(values * weight).sum(),
        return_sum=(returns * weight).sum(),
        return_square_sum=(returns.square() * weight).sum(),
        error_sum=errors.sum(),
        error_square_sum=errors.square().sum(),
    )


def _variance(num: float, total: float, square: float) -> float:
    return max(square / num - (total / num) ** 2, 0.0)
