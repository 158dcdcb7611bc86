"""CPGD: a policy gradient on the clipped log-ratio, pulled back to the old policy."""

import math
from typing import Annotated, Final

from vla_rl.algorithms.lazy_torch import torch
from vla_rl.algorithms.losses.declaration import (
    ClipHigh,
    ClipLow,
    LossResult,
    Parameter,
    declare_loss,
)
from vla_rl.algorithms.losses.diagnostics import diagnose
from vla_rl.algorithms.losses.ratio_levels import token_log_ratio
from vla_rl.algorithms.losses.token_batch import TokenBatch

MAX_DRIFT: Final = 2.0
"""Bound on the drift: it pulls no harder than at this ratio minus 1."""


@declare_loss("cpgd", terms_without_advantage=("drift_coef",))
def cpgd(
    batch: TokenBatch,
    *,
    clip_low: ClipLow = 0.2,
    clip_high: ClipHigh = 0.2,
    drift_coef: Annotated[float, Parameter("weight of the policy drift.", least=0.0)] = 1e-3,
) -> LossResult:
    """CPGD: a policy gradient on the clipped log-ratio, with a pull back to the old policy.

    Liu et al. 2025, arXiv:2505.12504.

        loss  = -A * min(l, log(1 + clip_high))  where A >= 0;  -A * max(l, log(1 - clip_low))  where A < 0
        drift = sg(min(rho - 1, 2)) * l,   whose gradient is that of KL(behavior || policy) up to the bound
        loss + drift_coef * drift                                                         l = log rho

    The ratio only bounds the gradient and does not weigh it, so nothing explodes if rho is large
    and A negative. We use l, the released code log_prob: the gradient is the same, and our loss is
    0 if the policies agree.
    """
    log_ratio = token_log_ratio(batch)
    advantage = batch.masked_advantage
    lowest = math.log1p(-clip_low) if clip_low < 1.0 else -math.inf
    bounded = torch.where(
        advantage >= 0.0, log_ratio.clamp(max=math.log1p(clip_high)), log_ratio.clamp(min=lowest)
    )
    clipped = (bounded != log_ratio).detach() & (advantage != 0.0)
    # expm1 keeps the digits of a ratio near 1, which exp(l) - 1 rounds away in float32
    drift = (torch.expm1(log_ratio.detach()).clamp(max=MAX_DRIFT)) * log_ratio
    losses = torch.where(batch.mask, -advantage * bounded + drift_coef * drift, 0.0)
    return losses, diagnose(log_ratio, batch.mask, clipped=clipped, extra={"policy_drift": drift})
