"""OPSM: the clipped surrogate without sequences that the policy has moved away from."""

import dataclasses
from typing import Annotated

from vla_rl.algorithms.lazy_torch import Tensor, torch
from vla_rl.algorithms.losses.declaration import (
    ClipHigh,
    ClipLow,
    DualClip,
    Level,
    LossResult,
    Parameter,
    declare_loss,
)
from vla_rl.algorithms.losses.policy.ppo import clipped_surrogate
from vla_rl.algorithms.losses.ratio_levels import MAX_LOG_RATIO
from vla_rl.algorithms.losses.sequences_of_rows import SequencesOfRows
from vla_rl.algorithms.losses.token_batch import TokenBatch


@declare_loss("opsm", needs_sequence_drift=True)
def sequence_masked_surrogate(
    batch: TokenBatch,
    *,
    clip_low: ClipLow = 0.2,
    clip_high: ClipHigh = 0.28,
    max_sequence_kl: Annotated[
        float,
        Parameter(
            "drop a sequence with a negative advantage if the sampler's log-prob minus the "
            "current one, averaged over its tokens, exceeds this, in nats. TRL suggests "
            "0.5.",
            least=0.0,
        ),
    ] = 0.1,
    dual_clip: DualClip = None,
    level: Level = "token",
) -> LossResult:
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
    """Average how much less likely the policy finds a sequence's tokens than their sampler did.

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
