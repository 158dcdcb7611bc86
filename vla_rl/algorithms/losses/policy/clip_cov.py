"""Clip-Cov: the clipped surrogate without a few tokens of high covariance."""

import dataclasses
from typing import Annotated

from vla_rl.algorithms.lazy_torch import Tensor, torch
from vla_rl.algorithms.losses.covariance import (
    CovarianceShare,
    num_chosen,
    token_covariance,
)
from vla_rl.algorithms.losses.declaration import (
    ClipHigh,
    ClipLow,
    LossResult,
    Parameter,
    declare_loss,
)
from vla_rl.algorithms.losses.policy.ppo import clipped_surrogate
from vla_rl.algorithms.losses.ratio_levels import token_log_ratio
from vla_rl.algorithms.losses.token_batch import TokenBatch


def dropped_by_clip_cov(
    batch: TokenBatch,
    *,
    clip_low: float,
    clip_high: float,
    covariance_share: float,
    covariance_low: float,
    covariance_high: float,
) -> Tensor:
    """Return the tokens that `clip_cov` leaves out, bool [B, T]."""
    losses, _ = clipped_surrogate(batch, clip_low=clip_low, clip_high=clip_high)
    covariance = token_covariance(batch)
    ratio = token_log_ratio(batch).detach().exp()
    has_gradient = losses.detach() == -batch.masked_advantage * ratio
    is_candidate = (
        batch.mask & has_gradient & (covariance > covariance_low) & (covariance < covariance_high)
    ).flatten()
    num = is_candidate.sum()
    wanted = torch.minimum(num_chosen(batch, covariance_share), num)
    # evenly spaced: candidate k is picked if k = i * num // wanted for a whole number i
    k = is_candidate.cumsum(0) - 1
    i = (k * wanted + num - 1) // num.clamp(min=1)
    picked = is_candidate & (i * num < (k + 1) * wanted)
    return picked.reshape(batch.mask.shape)


@declare_loss(
    "clip_cov", choose_tokens=dropped_by_clip_cov, ordered=("covariance_low", "covariance_high")
)
def clip_cov(
    batch: TokenBatch,
    *,
    clip_low: ClipLow = 0.2,
    clip_high: ClipHigh = 0.28,
    covariance_share: CovarianceShare = 2e-4,
    covariance_low: Annotated[
        float, Parameter("only tokens with a covariance above this may be clipped.")
    ] = 1.0,
    covariance_high: Annotated[
        float, Parameter("only tokens with a covariance below this may be clipped.")
    ] = 5.0,
) -> LossResult:
    """Compute the clipped surrogate, without a few tokens of high covariance.

        loss = 0 for covariance_share of all tokens (at least one, if the share is above 0), taken from those with
               covariance_low < cov < covariance_high and an unclipped ratio;  PPO for the others

    The paper draws them at random; we take them evenly spaced among the candidates, so that a loss
    is a function.
    """
    losses, diagnostics = clipped_surrogate(batch, clip_low=clip_low, clip_high=clip_high)
    dropped = batch.chosen_tokens
    if dropped is None:
        dropped = dropped_by_clip_cov(
            batch,
            clip_low=clip_low,
            clip_high=clip_high,
            covariance_share=covariance_share,
            covariance_low=covariance_low,
            covariance_high=covariance_high,
        )
    covariance = token_covariance(batch)
    reported = dataclasses.replace(
        diagnostics,
        num_dropped=dropped.float().sum(),
        extra_sums={"covariance": covariance.float().sum()},
    )
    return torch.where(dropped, 0.0, losses), reported
