"""GSPO: one clipped ratio for a whole sequence."""

from vla_rl.algorithms.losses.declaration import ClipHigh, ClipLow, LossResult, declare_loss
from vla_rl.algorithms.losses.policy.ppo import clipped_surrogate
from vla_rl.algorithms.losses.token_batch import TokenBatch


@declare_loss("gspo", is_of_sequences=True)
def gspo(
    batch: TokenBatch,
    *,
    clip_low: ClipLow = 3e-4,
    clip_high: ClipHigh = 4e-4,
) -> LossResult:
    """GSPO, in its token form (Zheng et al. 2025, arXiv:2507.18071).

        log s_t = sg(mean_t log rho_t) + log_prob_t - sg(log_prob_t),  clamped to at most 10
        loss    = max(-A * s, -A * clamp(s, 1 - clip_low, 1 + clip_high))

    The clip range is tiny (3e-4, 4e-4), because a mean over many tokens changes little. Use it with
    the aggregation `seq_mean_token_mean`, which gives the gradient of the sequence form. A sequence
    that spans several rows needs `sequence_log_ratio`.
    """
    return clipped_surrogate(batch, clip_low=clip_low, clip_high=clip_high, level="sequence")
