"""Losses that choose tokens by the covariance of log-prob with advantage: clip_cov, kl_cov.

They slow the decay of entropy at the tokens where it decays fastest: those of high covariance.

    cov_t = (A_t - mean A) * (log_prob_t - mean log_prob)

Cui et al. 2025, "The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models",
arXiv:2505.22617. Means and shares are those of the batch from which tokens are chosen. A learner
chooses from a whole mini-batch and passes the choice as `TokenBatch.chosen_tokens`, so that the
gradient does not depend on the micro-batches; without it, the loss chooses from the tokens of its
own batch. The metric `covariance` always uses the means of the loss's own batch.
"""

import dataclasses

from vla_rl.algorithms.losses.declaration import (
    ClipHigh,
    ClipLow,
    LossResult,
    declare_loss,
    diagnose,
)
from vla_rl.algorithms.losses.policy.ppo import PpoLossConfig, clipped_surrogate
from vla_rl.algorithms.losses.token_batch import TokenBatch, token_log_ratio
from vla_rl.algorithms.tensors import Tensor, torch
from vla_rl.types import Config, NonNegativeFloat, Share


class CovarianceConfig(Config, frozen=True, kw_only=True):
    """Share of the tokens that a loss chooses."""

    covariance_share: Share = 2e-4
    """Share of the tokens that is clipped or penalised."""


class ClipCovLossConfig(CovarianceConfig, frozen=True, kw_only=True):
    """Trust region of the ratio, and which tokens lose their gradient."""

    clip_low: ClipLow = 0.2
    clip_high: ClipHigh = 0.28

    covariance_low: float = 1.0
    """Only tokens with a covariance above this may be clipped."""

    covariance_high: float = 5.0
    """Only tokens with a covariance below this may be clipped."""

    def __post_init__(self) -> None:
        low = self.covariance_low
        self.require(
            low <= self.covariance_high, "covariance_high", f"at least covariance_low = {low}"
        )

    @property
    def clip(self) -> PpoLossConfig:
        """The trust region alone."""
        return PpoLossConfig(clip_low=self.clip_low, clip_high=self.clip_high)


def token_covariance(batch: TokenBatch) -> Tensor:
    """Return each token's share of the covariance of log-prob and advantage.

    float [B, T], constant, 0 where masked.
    """
    log_prob, advantage = batch.masked_log_prob.detach(), batch.masked_advantage
    count = batch.mask.sum().clamp(min=1)
    centred = (advantage - advantage.sum() / count) * (log_prob - log_prob.sum() / count)
    return torch.where(batch.mask, centred, 0.0)


def num_chosen(batch: TokenBatch, share: float) -> Tensor:
    """Return the number of tokens that a share is, int64 []; at least one if the share is above 0.

    It stays on the device, as all that is chosen by it: a count read on the host would wait for the
    device in every micro-batch.
    """
    count = (share * batch.mask.sum().double()).long()
    return count.clamp(min=1) if share > 0.0 else count


def dropped_by_clip_cov(batch: TokenBatch, config: ClipCovLossConfig) -> Tensor:
    """Return the tokens that `clip_cov` leaves out, bool [B, T]."""
    losses, _ = clipped_surrogate(batch, config.clip)
    covariance = token_covariance(batch)
    ratio = token_log_ratio(batch).detach().exp()
    has_gradient = losses.detach() == -batch.masked_advantage * ratio
    is_between = (covariance > config.covariance_low) & (covariance < config.covariance_high)
    is_candidate = (batch.mask & has_gradient & is_between).flatten()
    num = is_candidate.sum()
    wanted = torch.minimum(num_chosen(batch, config.covariance_share), num)
    # evenly spaced: candidate k is picked if k = i * num // wanted for a whole number i
    k = is_candidate.cumsum(0) - 1
    i = (k * wanted + num - 1) // num.clamp(min=1)
    picked = is_candidate & (i * num < (k + 1) * wanted)
    return picked.reshape(batch.mask.shape)


@declare_loss("clip_cov", choose_tokens=dropped_by_clip_cov)
def clip_cov(batch: TokenBatch, config: ClipCovLossConfig) -> LossResult:
    """Compute the clipped surrogate, without a few tokens of high covariance.

        loss = 0 for covariance_share of all tokens (at least one, if the share is above 0), taken from those with
               covariance_low < cov < covariance_high and an unclipped ratio;  PPO for the others

    The paper draws them at random; we take them evenly spaced among the candidates, so that a loss
    is a function.
    """
    losses, diagnostics = clipped_surrogate(batch, config.clip)
    dropped = batch.chosen_tokens
    if dropped is None:
        dropped = dropped_by_clip_cov(batch, config)
    covariance = token_covariance(batch)
    reported = dataclasses.replace(
        diagnostics,
        num_dropped=dropped.float().sum(),
        extra_sums={"covariance": covariance.float().sum()},
    )
    # exact zeros and not a small weight: the paper stops the gradient of these tokens, whose
    # entropy decays fastest
    return torch.where(dropped, 0.0, losses), reported


class KlCovLossConfig(CovarianceConfig, frozen=True, kw_only=True):
    """Penalty on the tokens of the highest covariance."""

    penalty_coef: NonNegativeFloat = 1.0
    """Weight of |log-ratio| on the chosen tokens."""


def penalised_by_kl_cov(batch: TokenBatch, config: KlCovLossConfig) -> Tensor:
    """Return the tokens that `kl_cov` penalises, bool [B, T]; `penalty_coef` does not matter."""
    ranked = torch.where(batch.mask, token_covariance(batch), -torch.inf).flatten()
    # stable, so that equal covariances are chosen in the order of the tokens, the same on a CPU and
    # a GPU
    order = ranked.argsort(stable=True)
    wanted = torch.minimum(num_chosen(batch, config.covariance_share), batch.mask.sum())
    chosen = torch.zeros_like(batch.mask).flatten()
    chosen[order] = torch.arange(len(order), device=order.device) >= len(order) - wanted
    return chosen.reshape(batch.mask.shape)


@declare_loss(
    "kl_cov",
    has_trust_region=False,
    choose_tokens=penalised_by_kl_cov,
    terms_without_advantage=("penalty_coef",),
)
def kl_cov(batch: TokenBatch, config: KlCovLossConfig) -> LossResult:
    """Compute the unclipped surrogate, with a penalty on the tokens of the highest covariance.

        loss = -A * rho, + penalty_coef * |log rho| for the covariance_share with the largest cov (at least one token)

    Nothing bounds the ratio of the other tokens.
    """
    log_ratio = token_log_ratio(batch)
    penalised = batch.chosen_tokens
    if penalised is None:
        penalised = penalised_by_kl_cov(batch, config)
    losses = -batch.masked_advantage * log_ratio.exp()
    losses = torch.where(penalised, losses + config.penalty_coef * log_ratio.abs(), losses)
    losses = torch.where(batch.mask, losses, 0.0)
    extra = {"covariance": token_covariance(batch), "penalised_fraction": penalised.float()}
    return losses, diagnose(log_ratio, batch.mask, extra=extra)
