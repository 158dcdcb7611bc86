"""Policy gradients whose importance weight is bounded otherwise than by PPO: gpg, cispo, sapo, cpgd, gmpo."""

import math
from typing import Final

from vla_rl.algorithms.losses.declaration import (
    ClipHigh,
    ClipLow,
    Level,
    LossResult,
    declare_loss,
    diagnose,
)
from vla_rl.algorithms.losses.token_batch import (
    MAX_SEQUENCE_LOG_RATIO,
    TokenBatch,
    ratios,
    sequence_mean,
    token_log_ratio,
)
from vla_rl.algorithms.tensors import Tensor, torch
from vla_rl.types import Config, NonNegativeFloat, PositiveFloat


class GpgLossConfig(Config, frozen=True, kw_only=True):
    """No parameters."""


@declare_loss("gpg", has_trust_region=False)
def gpg(batch: TokenBatch, config: GpgLossConfig) -> LossResult:
    """The plain policy gradient: no ratio at all.

    Williams 1992; Chu et al. 2025, GPG, arXiv:2504.02546.

        loss = -A * log_prob

    For on-policy data only: nothing bounds the step on older data.
    """
    losses = torch.where(batch.mask, -batch.masked_advantage * batch.masked_log_prob, 0.0)
    return losses, diagnose(token_log_ratio(batch), batch.mask)


class CispoLossConfig(Config, frozen=True, kw_only=True):
    """Bounds of the importance weight."""

    clip_low: ClipLow = 1.0
    clip_high: ClipHigh = 4.0
    level: Level = "token"


@declare_loss("cispo")
def cispo(batch: TokenBatch, config: CispoLossConfig) -> LossResult:
    """CISPO: clip the importance weight, not the update (MiniMax-M1, arXiv:2506.13585).

        loss = -sg(clamp(rho, 1 - clip_low, 1 + clip_high)) * A * log_prob

    clip_low = 1 leaves the lower bound out, as in the paper; clip_high = 4 bounds weights to 5
    (ours; the paper gives no number). Every token keeps a gradient; `clip_fraction` counts the
    clipped weights.
    """
    rho = ratios(batch, config.level)
    ratio = rho.ratio.detach()
    weight = ratio.clamp(1.0 - config.clip_low, 1.0 + config.clip_high)
    # every token keeps a gradient: PPO's clip takes it from rare tokens such as `However`, which
    # begin another way of reasoning, and MiniMax-M1 does without it for that
    losses = torch.where(batch.mask, -weight * batch.masked_advantage * batch.masked_log_prob, 0.0)
    return losses, diagnose(
        rho.token_log_ratio, batch.mask, level_log_ratio=rho.log_ratio, clipped=weight != ratio
    )


class SapoLossConfig(Config, frozen=True, kw_only=True):
    """Steepness of the soft gate."""

    temperature_positive: PositiveFloat = 1.0
    """Steepness of the soft gate for tokens with a positive advantage."""

    temperature_negative: PositiveFloat = 1.05
    """Steepness of the soft gate for tokens with a negative or zero advantage."""

    level: Level = "token"


@declare_loss("sapo")
def sapo(batch: TokenBatch, config: SapoLossConfig) -> LossResult:
    """SAPO: a soft gate instead of a clip (Gao et al. 2025, arXiv:2511.20347).

        loss = -A * sigmoid(tau * (rho - 1)) * 4 / tau
        tau = temperature_positive where A > 0, else temperature_negative

    At rho = 1 the gradient is the plain policy gradient; it fades on both sides, faster for
    negative advantages.
    """
    rho = ratios(batch, config.level)
    advantage = batch.masked_advantage
    # a tensor for one of them: torch.where makes float32 of two Python numbers
    positive = torch.full_like(advantage, config.temperature_positive)
    temperature = torch.where(advantage > 0.0, positive, config.temperature_negative)
    # sigmoid(tau * x) has the slope tau / 4 at 0: the factor 4 / tau makes the gradient at ratio 1
    # the plain policy gradient, whatever the temperature
    gate = torch.sigmoid(temperature * (rho.ratio - 1.0)) * 4.0 / temperature
    losses = torch.where(batch.mask, -advantage * gate * rho.share, 0.0)
    return losses, diagnose(rho.token_log_ratio, batch.mask, level_log_ratio=rho.log_ratio)


MAX_DRIFT: Final = 2.0
"""Bound on the drift: it pulls no harder than at this ratio minus 1."""


class CpgdLossConfig(Config, frozen=True, kw_only=True):
    """Bounds of the ratio, with a pull back."""

    clip_low: ClipLow = 0.2
    clip_high: ClipHigh = 0.2

    drift_coef: NonNegativeFloat = 1e-3
    """Weight of the policy drift."""


@declare_loss("cpgd", terms_without_advantage=("drift_coef",))
def cpgd(batch: TokenBatch, config: CpgdLossConfig) -> LossResult:
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
    lowest = math.log1p(-config.clip_low) if config.clip_low < 1.0 else -math.inf
    highest = math.log1p(config.clip_high)
    bounded = torch.where(
        advantage >= 0.0, log_ratio.clamp(max=highest), log_ratio.clamp(min=lowest)
    )
    # without an advantage a bound changes nothing, and would count tokens as clipped in every group
    # without signal
    clipped = (bounded != log_ratio).detach() & (advantage != 0.0)
    # expm1 keeps the digits of a ratio near 1, which exp(l) - 1 rounds away in float32
    drift = (torch.expm1(log_ratio.detach()).clamp(max=MAX_DRIFT)) * log_ratio
    losses = torch.where(batch.mask, -advantage * bounded + config.drift_coef * drift, 0.0)
    return losses, diagnose(log_ratio, batch.mask, clipped=clipped, extra={"policy_drift": drift})


class GmpoLossConfig(Config, frozen=True, kw_only=True):
    """Bounds of the log-ratio."""

    clip_low: NonNegativeFloat = 0.4
    """Lower bound of the log-ratio, as a positive number."""

    clip_high: NonNegativeFloat = 0.4
    """Upper bound of the log-ratio."""


def _bound(log_ratio: Tensor, advantage: Tensor, config: GmpoLossConfig) -> Tensor:
    positive, negative = (
        log_ratio.clamp(max=config.clip_high),
        log_ratio.clamp(min=-config.clip_low),
    )
    return torch.where(advantage >= 0.0, positive, negative)


@declare_loss("gmpo", is_of_sequences=True, averaged=_bound)
def gmpo(batch: TokenBatch, config: GmpoLossConfig) -> LossResult:
    """GMPO: the geometric mean of ratios that are clipped token by token.

    Zhao et al. 2025, arXiv:2507.20673.

        c_t  = min(l_t, clip_high) where A >= 0, max(l_t, -clip_low) where A < 0;    l_t = log rho_t
        loss = -A * exp(mean_t c_t)

    The bounds are on the log-ratio: 0.4 keeps ratios in [e^-0.4, e^0.4]. It has token form, like
    GSPO: use it with `seq_mean_token_mean`. For a sequence over several rows, `sequence_log_ratio`
    is the mean of c, not of l.
    """
    log_ratio = token_log_ratio(batch)
    advantage = batch.masked_advantage
    bounded = _bound(log_ratio, advantage, config)
    # as in cpgd: without an advantage a bound changes nothing
    clipped = (bounded != log_ratio).detach() & (advantage != 0.0)
    # value of the mean, gradient of the own token: rows of one sequence may be in different
    # micro-batches, and only so do their gradients add up to that of the whole sequence
    in_token_form = sequence_mean(batch, bounded) + bounded - bounded.detach()
    in_token_form = in_token_form.clamp(max=MAX_SEQUENCE_LOG_RATIO)
    losses = torch.where(batch.mask, -advantage * in_token_form.exp(), 0.0)
    return losses, diagnose(log_ratio, batch.mask, level_log_ratio=in_token_form, clipped=clipped)
