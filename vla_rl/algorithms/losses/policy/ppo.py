"""Losses that clip a probability ratio as PPO does: ppo, decoupled_ppo, gspo, opsm.

`decoupled_ppo` has three policies and two ratios:

behavior (the engine, maybe with older weights) ─► proximal (the trainer before this update) ─► current
                    weight w, constant                        clipped ratio u
"""

import dataclasses

from vla_rl.algorithms.losses.declaration import (
    ClipHigh,
    ClipLow,
    DualClip,
    Level,
    LossResult,
    declare_loss,
    diagnose,
)
from vla_rl.algorithms.losses.token_batch import (
    MAX_LOG_RATIO,
    RatioLevel,
    SequencesOfRows,
    TokenBatch,
    ratios,
)
from vla_rl.algorithms.tensors import Tensor, torch
from vla_rl.types import Config, NonNegativeFloat, PositiveFloat


class PpoLossConfig(Config, frozen=True, kw_only=True):
    """Trust region of the ratio, [1 - clip_low, 1 + clip_high], at `level`."""

    clip_low: ClipLow = 0.2
    clip_high: ClipHigh = 0.28
    dual_clip: DualClip | None = None
    level: Level = "token"


@declare_loss("ppo")
def clipped_surrogate(batch: TokenBatch, config: PpoLossConfig) -> LossResult:
    """Compute PPO's clipped objective, negated to be a loss.

    Schulman et al. 2017, arXiv:1707.06347, eq. 7.

        loss = max(-A * rho, -A * clamp(rho, 1 - clip_low, 1 + clip_high))
        loss = min(loss, -A * dual_clip)   where A < 0 (Ye et al. 2020, arXiv:1912.09729)

    Separate bounds are DAPO's clip-higher (Yu et al. 2025, arXiv:2503.14476, section 3.1).

    Args:
        batch: rho = exp(log_prob - behavior_log_prob), at `level`; see `ratios`.
        config: the trust region.

    Returns: losses [B, T] with exact zeros where masked, and diagnostics; `clip_fraction` counts
    the tokens whose loss a clip changed; these have no gradient.
    """
    rho = ratios(batch, config.level)
    advantage, ratio = batch.masked_advantage, rho.ratio
    unclipped = -advantage * ratio
    clipped_ratio = ratio.clamp(1.0 - config.clip_low, 1.0 + config.clip_high)
    losses = torch.maximum(unclipped, -advantage * clipped_ratio)
    # PPO's maximum leaves a negative advantage unbounded: at a ratio of 50 one token would outweigh
    # all others of the update
    if config.dual_clip is not None:
        bounded = torch.minimum(losses, -advantage * config.dual_clip)
        losses = torch.where(advantage < 0.0, bounded, losses)
    clipped = (losses != unclipped).detach()
    losses = torch.where(batch.mask, losses * rho.share, 0.0)
    return losses, diagnose(
        rho.token_log_ratio, batch.mask, level_log_ratio=rho.log_ratio, clipped=clipped
    )


class DecoupledPpoLossConfig(PpoLossConfig, frozen=True, kw_only=True):
    """Trust region around the trainer's own recent weights."""

    behavior_weight_cap: PositiveFloat = 5.0
    """Drop tokens whose weight proximal / behavior is above this; at the levels action and chunk,
    drop the whole control step or chunk."""


@declare_loss("decoupled_ppo", needs_proximal=True)
def decoupled_surrogate(batch: TokenBatch, config: DecoupledPpoLossConfig) -> LossResult:
    """Clip around the trainer's own recent weights, and weigh tokens by proximal / behavior.

        loss = w * PPO(exp(log_prob - proximal_log_prob)),    w from `behavior_weights`, 0 where dropped

    Hilton et al. 2021, arXiv:2110.00641; AReaL, arXiv:2505.24298. Dropped tokens stay in the
    denominators, as in AReaL; RLinf averages over those that are kept. At the level "sequence" the
    ratio is the mean over the kept tokens.

    At the level "sequence", a trajectory that spans several rows needs `correction_weight` and
    `sequence_log_ratio`.

    Raises: ValueError without `proximal_log_prob`.
    """
    proximal = batch.constant("proximal_log_prob", "decoupled_ppo")
    weight = batch.correction_weight
    if weight is None:
        weight = behavior_weights(
            batch, behavior_weight_cap=config.behavior_weight_cap, level=config.level
        )
    weight = torch.where(batch.mask, weight, 0.0).detach()
    around = dataclasses.replace(batch, behavior_log_prob=proximal, correction_weight=weight)
    losses, diagnostics = clipped_surrogate(around, config)
    dropped = batch.mask & (weight == 0.0)
    reported = dataclasses.replace(
        diagnostics,
        num_dropped=dropped.float().sum(),
        extra_sums={"behavior_weight_mean": weight.float().sum()},
    )
    return torch.where(dropped, 0.0, losses * weight), reported


def behavior_weights(
    batch: TokenBatch,
    *,
    behavior_weight_cap: float,
    level: RatioLevel,
    sequence: Tensor | None = None,
) -> Tensor:
    """Divide the probability of a choice before the update by its probability in the engine.

        kappa_t = exp(proximal_log_prob - behavior_log_prob), at the level of the ratio: of one token, or the
                  product over a control step or a row; dropped if it is above behavior_weight_cap
        w_t     = kappa_t;  at the level "sequence" the mean of kappa over the sequence's tokens that are kept

    A ratio that tokens share has one weight for all of them, as in AReaL (sequence) and RLinf
    (action, chunk): separate weights would distort the gradient of their common objective.

    Args:
        batch: with `proximal_log_prob`; the current policy is not read.
        behavior_weight_cap: largest weight that is not dropped.
        level: unit whose ratio is clipped.
        sequence: int64 [B], id of the sequence that each row belongs to; None: every row is one.

    Returns: float [B, T], constant; 0 where dropped or masked.
    """
    proximal = batch.constant("proximal_log_prob", "decoupled_ppo")
    acted = dataclasses.replace(batch, log_prob=proximal)
    kappa = ratios(acted, "token" if level == "sequence" else level).ratio
    # dropped and not truncated: a weight that is held at the cap would still train on a token of
    # weights that are long gone
    kept = batch.mask & (kappa <= behavior_weight_cap)
    if level != "sequence":
        return torch.where(kept, kappa, 0.0)
    return torch.where(kept, SequencesOfRows(batch.mask, sequence).means(kappa, kept), 0.0)


class GspoLossConfig(Config, frozen=True, kw_only=True):
    """Trust region of a sequence's ratio."""

    clip_low: ClipLow = 3e-4
    clip_high: ClipHigh = 4e-4


@declare_loss("gspo", is_of_sequences=True)
def gspo(batch: TokenBatch, config: GspoLossConfig) -> LossResult:
    """GSPO, in its token form (Zheng et al. 2025, arXiv:2507.18071).

        log s_t = sg(mean_t log rho_t) + log_prob_t - sg(log_prob_t),  clamped to at most 10
        loss    = max(-A * s, -A * clamp(s, 1 - clip_low, 1 + clip_high))

    The clip range is tiny (3e-4, 4e-4), because a mean over many tokens changes little. Use it with
    the aggregation `seq_mean_token_mean`, which gives the gradient of the sequence form. A sequence
    that spans several rows needs `sequence_log_ratio`.
    """
    clip = PpoLossConfig(clip_low=config.clip_low, clip_high=config.clip_high, level="sequence")
    return clipped_surrogate(batch, clip)


class OpsmLossConfig(PpoLossConfig, frozen=True, kw_only=True):
    """Trust region of tokens, with a bound on the drift of sequences."""

    max_sequence_kl: NonNegativeFloat = 0.1
    """Drop a sequence with a negative advantage if the sampler's log-prob minus the current one,
    averaged over its tokens, exceeds this, in nats. TRL suggests 0.5."""


@declare_loss("opsm", needs_sequence_drift=True)
def sequence_masked_surrogate(batch: TokenBatch, config: OpsmLossConfig) -> LossResult:
    """Leave out sequences with a negative advantage that the policy has moved away from.

    The rest is the clipped surrogate (DeepSeek-V3.2, arXiv:2512.02556, "off-policy sequence
    masking", eq. 9).

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
    losses, diagnostics = clipped_surrogate(batch, config)
    drift = batch.sequence_drift
    if drift is None:
        drift = sequence_drift(batch)
    # bad sequences alone: pushing down what the policy no longer says moves it somewhere that
    # nobody sampled, and pulling up what was good does not
    dropped = (drift > config.max_sequence_kl) & (batch.masked_advantage < 0.0)
    num_dropped = (dropped & batch.mask).float().sum()
    return torch.where(dropped, 0.0, losses), dataclasses.replace(
        diagnostics, num_dropped=num_dropped
    )


def sequence_drift(batch: TokenBatch, sequence: Tensor | None = None) -> Tensor:
    """Average how much less likely the policy finds a sequence's tokens than their sampler did.

        mean_t (sampler_log_prob - log_prob) over the tokens of the sequence: the k1 estimate of KL(sampler || policy)

    Args:
        batch: with the current policy's log-probs.
        sequence: int64 [B], id of the sequence that each row belongs to; None: every row is one.

    Returns: float [B, 1], constant.
    """
    # with a correction, `behavior_log_prob` is the trainer's own number by now; the drift is from
    # the engine that sampled
    sampler = "behavior_log_prob" if batch.sampler_log_prob is None else "sampler_log_prob"
    moved = batch.constant(sampler, "opsm") - batch.masked_log_prob.detach()
    return SequencesOfRows(batch.mask, sequence).means(
        moved.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO), batch.mask
    )
