"""Losses without a clip of the objective, which would remove a token's gradient: weights, gates and
plain policy gradients."""

import math

import torch
from torch import Tensor

from vla_rl.algorithms.losses.config import RatioLevel
from vla_rl.algorithms.losses.diagnostics import Diagnostics, diagnose
from vla_rl.algorithms.losses.ratio_levels import ratios, token_log_ratio
from vla_rl.algorithms.losses.token_batch import TokenBatch

MAX_DRIFT = 2.0
"""Bound on CPGD's drift: it pulls no harder than at this ratio minus 1."""


def cispo(
    batch: TokenBatch, *, clip_low: float, clip_high: float, level: RatioLevel = "token"
) -> tuple[Tensor, Diagnostics]:
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


def sapo(
    batch: TokenBatch,
    *,
    temperature_positive: float,
    temperature_negative: float,
    level: RatioLevel = "token",
) -> tuple[Tensor, Diagnostics]:
    """SAPO: a soft gate instead of a clip (Gao et al. 2025, arXiv:2511.20347).

        loss = -A * sigmoid(tau * (rho - 1)) * 4 / tau
        tau = temperature_positive where A > 0, else temperature_negative

    At rho = 1 the gradient is the plain policy gradient; it fades on both sides, faster for
    negative advantages.
    """
    rho = ratios(batch, level)
    advantage = batch.masked_advantage
    temperature = torch.where(advantage > 0.0, temperature_positive, temperature_negative).to(
        advantage.dtype
    )
    gate = torch.sigmoid(temperature * (rho.ratio - 1.0)) * 4.0 / temperature
    losses = torch.where(batch.mask, -advantage * gate * rho.share, 0.0)
    return losses, diagnose(rho.token_log_ratio, batch.mask, level_log_ratio=rho.log_ratio)


def cpgd(
    batch: TokenBatch, *, clip_low: float, clip_high: float, drift_coef: float
) -> tuple[Tensor, Diagnostics]:
    """CPGD: a policy gradient on the clipped log-ratio, with a pull back to the old policy (Liu et
    al. 2025, arXiv:2505.12504).

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
    drift = (torch.expm1(log_ratio.detach()).clamp(max=MAX_DRIFT)) * log_ratio
    losses = torch.where(batch.mask, -advantage * bounded + drift_coef * drift, 0.0)
    return losses, diagnose(log_ratio, batch.mask, clipped=clipped, extra={"policy_drift": drift})


def gpg(batch: TokenBatch) -> tuple[Tensor, Diagnostics]:
    """The plain policy gradient (Williams 1992; Chu et al. 2025, GPG, arXiv:2504.02546): no ratio
    at all.

        loss = -A * log_prob

    For on-policy data only: nothing bounds the step on older data.
    """
    losses = torch.where(batch.mask, -batch.masked_advantage * batch.masked_log_prob, 0.0)
    return losses, diagnose(token_log_ratio(batch), batch.mask)
