"""IPO: a trust region on probabilities, on both sides whatever the advantage."""

from vla_rl.algorithms.losses.declaration import LossResult, declare_loss
from vla_rl.algorithms.losses.hard_masks import (
    ProbabilityHigh,
    ProbabilityLow,
    PullBack,
    probability_change,
    pulled_back,
)
from vla_rl.algorithms.losses.token_batch import TokenBatch


@declare_loss("ipo", terms_without_advantage=("penalty_coef",))
def ipo(
    batch: TokenBatch,
    *,
    probability_low: ProbabilityLow = 0.1,
    probability_high: ProbabilityHigh = 0.1,
    penalty_coef: PullBack = 1e-3,
) -> LossResult:
    """IPO: the trust region of `dppo` on both sides, whatever the advantage.

    It has the same pull back (prime-rl's `ipo`).

        dropped if p - q > probability_high or p - q < -probability_low
        loss = -A * rho (kept) or 0 (dropped), + penalty_coef * (log rho)^2 for every token

    prime-rl has one threshold, 0.1, for both sides. `penalty_coef=0.0` turns the pull back off.
    """
    change = probability_change(batch)
    return pulled_back(
        batch, (change > probability_high) | (change < -probability_low), penalty_coef
    )
