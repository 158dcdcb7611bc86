"""Token batches small enough to follow, and gradients by finite differences."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vla_rl.algorithms.losses import PolicyLoss, PolicyLossConfig, TokenBatch, policy_loss


def row(*values: float) -> Tensor:
    """float64 [1, T]."""
    return torch.tensor([values], dtype=torch.float64)


def ratios_of(*values: float) -> Tensor:
    """Log-probs whose ratio to a behavior policy of log-prob 0 is this: float64 [1, T]."""
    return row(*(math.log(value) for value in values))


def batch_of(ratios: tuple[float, ...], advantages: tuple[float, ...], **others: Any) -> TokenBatch:
    """One row with these ratios and advantages, all unmasked unless said otherwise."""
    mask = others.pop("mask", torch.ones(1, len(ratios), dtype=torch.bool))
    return TokenBatch(
        log_prob=ratios_of(*ratios).requires_grad_(),
        behavior_log_prob=torch.zeros(1, len(ratios), dtype=torch.float64),
        advantage=row(*advantages),
        mask=mask,
        **others,
    )


def random_batch(
    rows: int = 4, tokens: int = 6, seed: int = 0, spread: float = 0.3, **others: Any
) -> TokenBatch:
    """Log-probs around -1, ratios around 1, advantages of both signs, a fifth of the tokens masked;
    float64.

    The first token of every row is unmasked; `others` replaces or adds fields.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal() -> Tensor:
        return torch.randn(rows, tokens, generator=generator, dtype=torch.float64)

    behavior = -1.0 + 0.5 * normal()
    mask = torch.rand(rows, tokens, generator=generator) < 0.8
    mask[:, :1] = True
    fields: dict[str, Any] = {
        "log_prob": (behavior + spread * normal()).requires_grad_(),
        "behavior_log_prob": behavior,
        "advantage": normal(),
        "mask": mask,
        "proximal_log_prob": behavior + 0.5 * spread * normal(),
        "reference_log_prob": behavior + spread * normal(),
        "action_tokens": 2 if tokens % 2 == 0 else None,
    }
    return TokenBatch(**(fields | others))


def loss_of(name: str, **changes: Any) -> PolicyLoss:
    """Return the loss of this name, with these parameters and the defaults of the others."""
    return policy_loss(PolicyLossConfig(name=name, **changes))


def covariance_batch() -> TokenBatch:
    """Log-probs -3, -1, -1, -3 and advantages -1, 1, -1, 1: covariances 1, 1, -1, -1.

    All ratios are 1.
    """
    log_prob = row(-3.0, -1.0, -1.0, -3.0)
    return TokenBatch(
        log_prob=log_prob.clone().requires_grad_(),
        behavior_log_prob=log_prob,
        advantage=row(-1.0, 1.0, -1.0, 1.0),
        mask=torch.ones(1, 4, dtype=torch.bool),
    )


def probabilities(
    current: tuple[float, ...], acted: tuple[float, ...], advantages: tuple[float, ...]
) -> TokenBatch:
    """Return one row of tokens with these probabilities now and under the policy that acted."""
    return TokenBatch(
        log_prob=ratios_of(*current).requires_grad_(),
        behavior_log_prob=ratios_of(*acted),
        advantage=row(*advantages),
        mask=torch.ones(1, len(current), dtype=torch.bool),
    )


def gradient(loss: PolicyLoss, batch: TokenBatch) -> Tensor:
    """d sum(losses) / d log_prob: float64 [B, T]."""
    losses, _ = loss(batch)
    (result,) = torch.autograd.grad(losses.sum(), batch.log_prob)
    return result


def finite_differences(
    function: Callable[[Tensor], Tensor], at: Tensor, step: float = 1e-6
) -> Tensor:
    """The gradient of a scalar function by central differences."""
    point = at.detach().clone()
    result = torch.zeros_like(point)
    for index in range(point.numel()):
        ends = []
        for sign in (1.0, -1.0):
            moved = point.clone()
            moved.view(-1)[index] += sign * step
            ends.append(float(function(moved)))
        result.view(-1)[index] = (ends[0] - ends[1]) / (2.0 * step)
    return result
