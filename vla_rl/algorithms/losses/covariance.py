"""Losses that slow the decay of entropy at the tokens where it decays fastest: those with high
covariance of log-prob and advantage.

    cov_t = (A_t - mean A) * (log_prob_t - mean log_prob)

Cui et al. 2025, "The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models",
arXiv:2505.22617. Means and shares are those of the batch from which tokens are chosen. A learner
chooses from a whole mini-batch and passes the choice as `TokenBatch.chosen_tokens`, so that the
gradient does not depend on the micro-batches; without it, the loss chooses from the tokens of its
own batch. The metric `covariance` always uses the means of the loss's own batch.
"""

import dataclasses

import torch
from torch import Tensor

from vla_rl.algorithms.losses.clipped_surrogates import clipped_surrogate
from vla_rl.algorithms.losses.diagnostics import Diagnostics, diagnose
from vla_rl.algorithms.losses.ratio_levels import token_log_ratio
from vla_rl.algorithms.losses.token_batch import TokenBatch


def clip_cov(
    batch: TokenBatch,
    *,
    clip_low: float,
    clip_high: float,
    covariance_share: float,
    covariance_low: float,
    covariance_high: float,
) -> tuple[Tensor, Diagnostics]:
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
    )
    candidates = is_candidate.flatten().nonzero()[:, 0]
    wanted = min(_count(batch, covariance_share), len(candidates))
    picked = candidates[
        torch.arange(wanted, device=candidates.device) * len(candidates) // max(wanted, 1)
    ]
    return _marked(picked, batch)


def kl_cov(
    batch: TokenBatch, *, covariance_share: float, penalty_coef: float
) -> tuple[Tensor, Diagnostics]:
    """Compute the unclipped surrogate, with a penalty on the tokens of the highest covariance.

        loss = -A * rho, + penalty_coef * |log rho| for the covariance_share with the largest cov (at least one token)

    Nothing bounds the ratio of the other tokens.
    """
    log_ratio = token_log_ratio(batch)
    penalised = batch.chosen_tokens
    if penalised is None:
        penalised = penalised_by_kl_cov(batch, covariance_share=covariance_share)
    losses = -batch.masked_advantage * log_ratio.exp()
    losses = torch.where(penalised, losses + penalty_coef * log_ratio.abs(), losses)
    losses = torch.where(batch.mask, losses, 0.0)
    extra = {"covariance": token_covariance(batch), "penalised_fraction": penalised.float()}
    return losses, diagnose(log_ratio, batch.mask, extra=extra)


def penalised_by_kl_cov(batch: TokenBatch, *, covariance_share: float) -> Tensor:
    """Return the tokens that `kl_cov` penalises, bool [B, T]."""
    wanted = min(_count(batch, covariance_share), int(batch.mask.sum()))
    ranked = (
        torch.where(batch.mask, token_covariance(batch), -torch.inf).flatten().topk(wanted).indices
    )
    return _marked(ranked, batch)


def token_covariance(batch: TokenBatch) -> Tensor:
    """Return each token's share of the covariance of log-prob and advantage: float [B, T],
    constant, 0 where masked.
    """
    log_prob, advantage = batch.masked_log_prob.detach(), batch.masked_advantage
    count = batch.mask.sum().clamp(min=1)
    centred = (advantage - advantage.sum() / count) * (log_prob - log_prob.sum() / count)
    return torch.where(batch.mask, centred, 0.0)


def _marked(places: Tensor, batch: TokenBatch) -> Tensor:
    """Return bool [B, T], True at the indices int64 [n] of the flattened batch."""
    chosen = torch.zeros_like(batch.mask).flatten()
    chosen[places] = True
    return chosen.reshape(batch.mask.shape)


def _count(batch: TokenBatch, share: float) -> int:
    return max(int(share * int(batch.mask.sum())), 1) if share > 0.0 else 0
