"""PPO's clipped surrogate."""

from vla_rl.algorithms.lazy_torch import torch
from vla_rl.algorithms.losses.declaration import (
    ClipHigh,
    ClipLow,
    DualClip,
    Level,
    LossResult,
    declare_loss,
)
from vla_rl.algorithms.losses.diagnostics import diagnose
from vla_rl.algorithms.losses.ratio_levels import ratios
from vla_rl.algorithms.losses.token_batch import TokenBatch


@declare_loss("ppo")
def clipped_surrogate(
    batch: TokenBatch,
    *,
    clip_low: ClipLow = 0.2,
    clip_high: ClipHigh = 0.28,
    dual_clip: DualClip = None,
    level: Level = "token",
) -> LossResult:
    """Compute PPO's clipped objective, negated to be a loss.

    Schulman et al. 2017, arXiv:1707.06347, eq. 7.

        loss = max(-A * rho, -A * clamp(rho, 1 - clip_low, 1 + clip_high))
        loss = min(loss, -A * dual_clip)   where A < 0 (Ye et al. 2020, arXiv:1912.09729)

    Separate bounds are DAPO's clip-higher (Yu et al. 2025, arXiv:2503.14476, section 3.1).

    Args:
        batch: rho = exp(log_prob - behavior_log_prob), at `level`.
        clip_low, clip_high: trust region of the ratio, [1 - clip_low, 1 + clip_high].
        dual_clip: bound c > 1 on the loss of tokens with a negative advantage and a large ratio;
            None turns it off.
        level: unit whose ratio is clipped; see `ratios`.

    Returns: losses [B, T] with exact zeros where masked, and diagnostics; `clip_fraction` counts
    the tokens whose loss a clip changed; these have no gradient.
    """
    rho = ratios(batch, level)
    advantage, ratio = batch.masked_advantage, rho.ratio
    unclipped = -advantage * ratio
    losses = torch.maximum(unclipped, -advantage * ratio.clamp(1.0 - clip_low, 1.0 + clip_high))
    # PPO's maximum leaves a negative advantage unbounded: at a ratio of 50 one token would outweigh
    # all others of the update
    if dual_clip is not None:
        losses = torch.where(advantage < 0.0, torch.minimum(losses, -advantage * dual_clip), losses)
    clipped = (losses != unclipped).detach()
    losses = torch.where(batch.mask, losses * rho.share, 0.0)
    return losses, diagnose(
        rho.token_log_ratio, batch.mask, level_log_ratio=rho.log_ratio, clipped=clipped
    )
