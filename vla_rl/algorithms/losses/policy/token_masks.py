"""Losses that drop the tokens outside a trust region: dppo, ipo, icepop, m2po.

The tokens inside have the importance-weighted gradient.
"""

from vla_rl.algorithms.losses.declaration import LossResult, declare_loss, diagnose
from vla_rl.algorithms.losses.token_batch import TokenBatch, token_log_ratio
from vla_rl.algorithms.tensors import Tensor, torch
from vla_rl.types import Config, NonNegativeFloat


def pulled_back(batch: TokenBatch, dropped: Tensor, penalty_coef: float) -> LossResult:
    """Compute the loss without the dropped tokens, plus the squared log-ratio of every token."""
    losses, diagnostics = masked_importance(batch, dropped)
    # dropped tokens are pulled back too: without that, nothing would keep them from drifting
    # further out, where they no longer have a gradient
    return losses + penalty_coef * token_log_ratio(batch).square(), diagnostics


def masked_importance(batch: TokenBatch, dropped: Tensor) -> LossResult:
    """Compute -A * rho for the tokens that are not dropped."""
    log_ratio = token_log_ratio(batch)
    kept = batch.mask & ~dropped
    losses = torch.where(kept, -batch.masked_advantage * log_ratio.exp(), 0.0)
    return losses, diagnose(log_ratio, batch.mask, dropped=dropped)


def probability_change(batch: TokenBatch) -> Tensor:
    """Compute by how much the probability of each token has changed: float [B, T], constant."""
    # probabilities and not ratios: a token of probability 1e-4 that doubles changes nothing that
    # the policy does, and PPO would clip it
    behavior = batch.constant("behavior_log_prob", "a trust region on probabilities")
    return batch.masked_log_prob.detach().exp() - behavior.exp()


class DppoLossConfig(Config, frozen=True, kw_only=True):
    """Trust region on probabilities, with a pull back."""

    probability_low: NonNegativeFloat = 0.2
    """Drop a token if its probability fell by more than this; 1 keeps every token."""

    probability_high: NonNegativeFloat = 0.2
    """Drop a token if its probability rose by more than this; 1 keeps every token."""

    penalty_coef: NonNegativeFloat = 1e-3
    """Weight of the squared log-ratio on all tokens."""


@declare_loss("dppo", terms_without_advantage=("penalty_coef",))
def dppo(batch: TokenBatch, config: DppoLossConfig) -> LossResult:
    """DPPO: a trust region on probabilities instead of ratios, with a weak pull back (Qi et al.
    2026, arXiv:2602.04879, with the penalty that prime-rl adds).

        dropped where A > 0 and p - q > probability_high, or A <= 0 and p - q < -probability_low
        loss = -A * rho (kept) or 0 (dropped), + penalty_coef * (log rho)^2 for every token

    p = exp(log_prob), q = exp(behavior_log_prob). A rare token may change its ratio a lot before
    its probability moves.
    """
    change = probability_change(batch)
    dropped = torch.where(
        batch.masked_advantage > 0.0,
        change > config.probability_high,
        change < -config.probability_low,
    )
    return pulled_back(batch, dropped, config.penalty_coef)


class IpoLossConfig(DppoLossConfig, frozen=True, kw_only=True):
    """Trust region on probabilities, whatever the advantage."""

    probability_low: NonNegativeFloat = 0.1
    probability_high: NonNegativeFloat = 0.1


@declare_loss("ipo", terms_without_advantage=("penalty_coef",))
def ipo(batch: TokenBatch, config: IpoLossConfig) -> LossResult:
    """IPO: the trust region of `dppo` on both sides, whatever the advantage.

    It has the same pull back (prime-rl's `ipo`).

        dropped if p - q > probability_high or p - q < -probability_low
        loss = -A * rho (kept) or 0 (dropped), + penalty_coef * (log rho)^2 for every token

    prime-rl has one threshold, 0.1, for both sides. `penalty_coef=0.0` turns the pull back off.
    """
    change = probability_change(batch)
    dropped = (change > config.probability_high) | (change < -config.probability_low)
    return pulled_back(batch, dropped, config.penalty_coef)


class IcePopLossConfig(Config, frozen=True, kw_only=True):
    """Interval of ratios that are kept."""

    weight_low: NonNegativeFloat = 0.5
    """Drop tokens whose ratio is below this."""

    weight_high: NonNegativeFloat = 5.0
    """Drop tokens whose ratio is above this."""

    def __post_init__(self) -> None:
        self.require(
            self.weight_low <= self.weight_high,
            "weight_high",
            f"at least weight_low = {self.weight_low}",
        )


@declare_loss("icepop")
def icepop(batch: TokenBatch, config: IcePopLossConfig) -> LossResult:
    """IcePop: the ratio as a weight, 0 outside an interval (Ling team 2025, arXiv:2510.18855).

    loss = -A * rho   where weight_low <= rho <= weight_high, else 0
    """
    ratio = token_log_ratio(batch).detach().exp()
    return masked_importance(batch, (ratio < config.weight_low) | (ratio > config.weight_high))


class M2poLossConfig(Config, frozen=True, kw_only=True):
    """Bound on the second moment of the log-ratio."""

    max_second_moment: NonNegativeFloat = 0.04
    """Drop tokens, those with the largest |log-ratio| first, until the mean squared log-ratio is at
    most this."""


def dropped_by_m2po(batch: TokenBatch, config: M2poLossConfig) -> Tensor:
    """Return the tokens that `m2po` leaves out, bool [B, T]; anything where masked."""
    # padding sorts last, so that it never counts in a moment of real tokens
    squares = torch.where(batch.mask, token_log_ratio(batch).detach().square(), torch.inf).flatten()
    ascending, order = squares.sort(stable=True)
    moments = ascending.cumsum(0) / torch.arange(1, len(ascending) + 1, device=squares.device)
    dropped = torch.zeros_like(batch.mask).flatten()
    dropped[order] = ~(moments <= config.max_second_moment)
    return dropped.reshape(batch.mask.shape)


@declare_loss("m2po", choose_tokens=dropped_by_m2po)
def m2po(batch: TokenBatch, config: M2poLossConfig) -> LossResult:
    """M2PO: drop the farthest tokens until the second moment of the log-ratio is small.

    Zheng et al. 2025, arXiv:2510.01161.

        loss = -A * rho for the largest set of nearest tokens with mean (log rho)^2 <= max_second_moment, else 0

    The moment is that of the batch from which tokens are chosen: the whole mini-batch if a learner
    passes its choice as `TokenBatch.chosen_tokens`, else the loss's own batch.
    """
    dropped = batch.chosen_tokens
    if dropped is None:
        dropped = dropped_by_m2po(batch, config)
    return masked_importance(batch, dropped)
