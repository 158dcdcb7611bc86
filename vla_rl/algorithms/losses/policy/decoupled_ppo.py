"""Decoupled PPO: three policies, two ratios.

behavior (the engine, maybe with older weights) ─► proximal (the trainer before this update) ─► current
                    weight w, constant                        clipped ratio u
"""

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
from vla_rl.algorithms.losses.ratio_levels import RatioLevel, ratios
from vla_rl.algorithms.losses.sequences_of_rows import SequencesOfRows
from vla_rl.algorithms.losses.token_batch import TokenBatch


@declare_loss("decoupled_ppo", needs_proximal=True)
def decoupled_surrogate(
    batch: TokenBatch,
    *,
    clip_low: ClipLow = 0.2,
    clip_high: ClipHigh = 0.28,
    dual_clip: DualClip = None,
    behavior_weight_cap: Annotated[
        float,
        Parameter(
            "drop tokens whose weight proximal / behavior is above this; at the levels "
            "action and chunk, drop the whole control step or chunk.",
            above=0.0,
        ),
    ] = 5.0,
    level: Level = "token",
) -> LossResult:
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
        weight = behavior_weights(batch, behavior_weight_cap=behavior_weight_cap, level=level)
    weight = torch.where(batch.mask, weight, 0.0).detach()
    around = dataclasses.replace(batch, behavior_log_prob=proximal, correction_weight=weight)
    losses, diagnostics = clipped_surrogate(
        around, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip, level=level
    )
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
    kept = batch.mask & (kappa <= behavior_weight_cap)
    if level != "sequence":
        return torch.where(kept, kappa, 0.0)
    return torch.where(kept, SequencesOfRows(batch.mask, sequence).means(kappa, kept), 0.0)
