"""PPO's clipped surrogate, alone and decoupled from the policy that acted."""

import dataclasses

import torch
from torch import Tensor

from vla_rl.algorithms.losses.config import RatioLevel
from vla_rl.algorithms.losses.diagnostics import Diagnostics, diagnose
from vla_rl.algorithms.losses.ratio_levels import MAX_LOG_RATIO, ratios
from vla_rl.algorithms.losses.token_batch import TokenBatch


def clipped_surrogate(
    batch: TokenBatch,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
    level: RatioLevel = "token",
) -> tuple[Tensor, Diagnostics]:
    """PPO's clipped objective, negated to be a loss (Schulman et al. 2017, arXiv:1707.06347, eq. 7).

        loss = max(-A * rho, -A * clamp(rho, 1 - clip_low, 1 + clip_high))
        loss = min(loss, -A * dual_clip)   where A < 0 (Ye et al. 2020, arXiv:1912.09729)

    Separate bounds are DAPO's clip-higher (Yu et al. 2025, arXiv:2503.14476, section 3.1).

    Args:
        batch: rho = exp(log_prob - behavior_log_prob), at `level`.
        clip_low, clip_high: trust region of the ratio, [1 - clip_low, 1 + clip_high].
        dual_clip: bound c > 1 on the loss of tokens with a negative advantage and a large ratio; None leaves it out.
        level: whose ratio is clipped; see `ratios`.

    Returns: losses [B, T] with exact zeros where masked, and diagnostics; `clip_fraction` counts the tokens whose loss one
    of the clips changed, which are those without a gradient.
    """
    rho = ratios(batch, level)
    advantage, ratio = batch.masked_advantage, rho.ratio
    unclipped = -advantage * ratio
    losses = torch.maximum(unclipped, -advantage * ratio.clamp(1.0 - clip_low, 1.0 + clip_high))
    if dual_clip is not None:
        losses = torch.where(advantage < 0.0, torch.minimum(losses, -advantage * dual_clip), losses)
    clipped = (losses != unclipped).detach()
    losses = torch.where(batch.mask, losses * rho.share, 0.0)
    return losses, diagnose(rho.token_log_ratio, batch.mask, level_log_ratio=rho.log_ratio, clipped=clipped)


def decoupled_surrogate(
    batch: TokenBatch,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
    behavior_weight_cap: float = 5.0,
    level: RatioLevel = "token",
) -> tuple[Tensor, Diagnostics]:
    """The clipped surrogate around the trainer's own recent weights, for data of older ones: three policies, two ratios.

        w    = exp(proximal_log_prob - behavior_log_prob), constant
        loss = w * PPO(exp(log_prob - proximal_log_prob))   where w <= behavior_weight_cap, else 0

    Hilton et al. 2021, arXiv:2110.00641; AReaL, arXiv:2505.24298. The weight is token by token. Dropped
    tokens stay in the denominators, as in AReaL; RLinf averages over those that are kept.

    Raises: ValueError without `proximal_log_prob`.
    """
    proximal = batch.constant("proximal_log_prob", "decoupled_ppo")
    log_weight = proximal - batch.constant("behavior_log_prob", "decoupled_ppo")
    weight = log_weight.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    dropped = weight > behavior_weight_cap
    around = dataclasses.replace(batch, behavior_log_prob=proximal)
    losses, diagnostics = clipped_surrogate(
        around, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip, level=level
    )
    num_dropped = (dropped & batch.mask).float().sum()
    weight_sum = torch.where(batch.mask, weight.float(), 0.0).sum()
    return torch.where(dropped, 0.0, losses * weight), dataclasses.replace(
        diagnostics, num_dropped=num_dropped, extra_sums={"behavior_weight_mean": weight_sum}
    )
