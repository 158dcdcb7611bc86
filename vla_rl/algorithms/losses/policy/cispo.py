"""CISPO: clip the importance weight instead of the update."""

from vla_rl.algorithms.lazy_torch import torch
from vla_rl.algorithms.losses.declaration import ClipHigh, ClipLow, Level, LossResult, declare_loss
from vla_rl.algorithms.losses.diagnostics import diagnose
from vla_rl.algorithms.losses.ratio_levels import ratios
from vla_rl.algorithms.losses.token_batch import TokenBatch


@declare_loss("cispo")
def cispo(
    batch: TokenBatch,
    *,
    clip_low: ClipLow = 1.0,
    clip_high: ClipHigh = 4.0,
    level: Level = "token",
) -> LossResult:
    """CISPO: clip the importance weight, not the update (MiniMax-M1, arXiv:2506.13585).

        loss = -sg(clamp(rho, 1 - clip_low, 1 + clip_high)) * A * log_prob

    clip_low = 1 leaves the lower bound out, as in the paper; clip_high = 4 bounds weights to 5
    (ours; the paper gives no number). Every token keeps a gradient; `clip_fraction` counts the
    clipped weights.
    """
    rho = ratios(batch, level)
    ratio = rho.ratio.detach()
    weight = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    losses = torch.where(batch.mask, -weight * batch.masked_advantage * batch.masked_log_prob, 0.0)
    return losses, diagnose(
        rho.token_log_ratio, batch.mask, level_log_ratio=rho.log_ratio, clipped=weight != ratio
    )
