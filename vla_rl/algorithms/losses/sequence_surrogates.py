"""Losses with the length-normalised ratio of the whole sequence, which is clipped as one."""

import dataclasses

import torch
from torch import Tensor

from vla_rl.algorithms.losses.clipped_surrogates import clipped_surrogate
from vla_rl.algorithms.losses.config import PolicyLossConfig, RatioLevel
from vla_rl.algorithms.losses.diagnostics import Diagnostics, diagnose
from vla_rl.algorithms.losses.ratio_levels import (
    MAX_LOG_RATIO,
    MAX_SEQUENCE_LOG_RATIO,
    ratios,
    sequence_mean,
    token_log_ratio,
)
from vla_rl.algorithms.losses.sequences_of_rows import SequencesOfRows
from vla_rl.algorithms.losses.token_batch import TokenBatch


def gspo(batch: TokenBatch, *, clip_low: float, clip_high: float) -> tuple[Tensor, Diagnostics]:
    """GSPO, in its token form (Zheng et al. 2025, arXiv:2507.18071).

        log s_t = sg(mean_t log rho_t) + log_prob_t - sg(log_prob_t),  clamped to at most 10
        loss    = max(-A * s, -A * clamp(s, 1 - clip_low, 1 + clip_high))

    The clip range is tiny (3e-4, 4e-4), because a mean over many tokens changes little. Use it with
    the aggregation `seq_mean_token_mean`, which gives the gradient of the sequence form. A sequence
    that spans several rows needs `sequence_log_ratio`.
    """
    return clipped_surrogate(batch, clip_low=clip_low, clip_high=clip_high, level="sequence")


def gmpo(batch: TokenBatch, *, clip_low: float, clip_high: float) -> tuple[Tensor, Diagnostics]:
    """GMPO: the geometric mean of ratios that are clipped token by token (Zhao et al. 2025,
    arXiv:2507.20673).

        c_t  = min(l_t, clip_high) where A >= 0, max(l_t, -clip_low) where A < 0;    l_t = log rho_t
        loss = -A * exp(mean_t c_t)

    The bounds are on the log-ratio: 0.4 keeps ratios in [e^-0.4, e^0.4]. It has token form, like
    GSPO: use it with `seq_mean_token_mean`. For a sequence over several rows, `sequence_log_ratio`
    is the mean of c, not of l.
    """
    log_ratio = token_log_ratio(batch)
    advantage = batch.masked_advantage
    bounded = _gmpo_bounded(log_ratio, advantage, clip_low, clip_high)
    clipped = (bounded != log_ratio).detach()
    in_token_form = sequence_mean(batch, bounded) + bounded - bounded.detach()
    in_token_form = in_token_form.clamp(max=MAX_SEQUENCE_LOG_RATIO)
    losses = torch.where(batch.mask, -advantage * in_token_form.exp(), 0.0)
    return losses, diagnose(log_ratio, batch.mask, level_log_ratio=in_token_form, clipped=clipped)


def sequence_masked_surrogate(
    batch: TokenBatch,
    *,
    clip_low: float,
    clip_high: float,
    max_sequence_kl: float,
    dual_clip: float | None = None,
    level: RatioLevel = "token",
) -> tuple[Tensor, Diagnostics]:
    """Leave out sequences with a negative advantage that the policy has moved away from; the rest
    is the clipped surrogate (DeepSeek-V3.2, arXiv:2512.02556, "off-policy sequence masking", eq.
    9).

        loss = 0   if A < 0 and mean_t (sampler_log_prob - log_prob) > max_sequence_kl, else PPO

    The drift is always measured from the policy that sampled, with the engine's own numbers, as in
    the paper and in TRL; a correction changes only the ratio of the surrogate.

    The default bound of 0.1 nats lies between two figures. Rounding with a standard deviation of
    0.03 per token moves the mean over the 7 tokens of one action by 0.011 and drops nothing. At
    0.22, a mean ratio of 0.8, PPO's own clip has already left most of the tokens of such a sequence
    without a gradient.

    A sequence that spans several rows needs `sequence_drift`, and at the level "sequence" also
    `sequence_log_ratio`.
    """
    losses, diagnostics = clipped_surrogate(
        batch, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip, level=level
    )
    drift = batch.sequence_drift
    if drift is None:
        drift = sequence_drift(batch)
    dropped = (drift > max_sequence_kl) & (batch.masked_advantage < 0.0)
    num_dropped = (dropped & batch.mask).float().sum()
    return torch.where(dropped, 0.0, losses), dataclasses.replace(
        diagnostics, num_dropped=num_dropped
    )


def sequence_drift(batch: TokenBatch, sequence: Tensor | None = None) -> Tensor:
    """Average over a sequence how much less likely the current policy finds each token than the
    policy that sampled it.

        mean_t (sampler_log_prob - log_prob) over the tokens of the sequence: the k1 estimate of KL(sampler || policy)

    Args:
        batch: with the current policy's log-probs.
        sequence: int64 [B], id of the sequence that each row belongs to; None: every row is one.

    Returns: float [B, 1], constant.
    """
    sampler = "behavior_log_prob" if batch.sampler_log_prob is None else "sampler_log_prob"
    moved = batch.constant(sampler, "opsm") - batch.masked_log_prob.detach()
    return SequencesOfRows(batch.mask, sequence).means(
        moved.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO), batch.mask
    )


def sequence_log_ratio(config: PolicyLossConfig, batch: TokenBatch, sequence: Tensor) -> Tensor:
    """Compute `TokenBatch.sequence_log_ratio` for sequences that span several rows, over a whole
    mini-batch at once.

    Args:
        config: the loss that needs it. GMPO's mean is over clipped log-ratios; with a correction,
            and for decoupled_ppo, ratios are against `proximal_log_prob`.
        batch: all rows of the mini-batch, with the current policy's log-probs, and the
            `correction_weight` of the update if there is one; its own `sequence_log_ratio` is not
            read.
        sequence: int64 [B], id of the sequence that each row belongs to.

    Returns: float [B, 1], constant.
    """
    if config.needs_proximal:
        proximal = batch.constant("proximal_log_prob", f"the sequence ratio of {config.name!r}")
        batch = dataclasses.replace(batch, behavior_log_prob=proximal)
    by_token = ratios(batch).token_log_ratio.detach()
    if config.name == "gmpo":
        by_token = _gmpo_bounded(
            by_token,
            batch.masked_advantage,
            config.parameters["clip_low"],
            config.parameters["clip_high"],
        )
    return SequencesOfRows(batch.mask, sequence).means(by_token, batch.counted)


def _gmpo_bounded(
    log_ratio: Tensor, advantage: Tensor, clip_low: float, clip_high: float
) -> Tensor:
    return torch.where(
        advantage >= 0.0, log_ratio.clamp(max=clip_high), log_ratio.clamp(min=-clip_low)
    )
