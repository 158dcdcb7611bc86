"""DPPO: a trust region on probabilities instead of ratios."""

from vla_rl.algorithms.lazy_torch import torch
from vla_rl.algorithms.losses.declaration import LossResult, declare_loss
from vla_rl.algorithms.losses.hard_masks import (
    ProbabilityHigh,
    ProbabilityLow,
    PullBack,
    probability_change,
    pulled_back,
)
from vla_rl.algorithms.losses.token_batch import TokenBatch


@declare_loss("dppo", terms_without_advantage=("penalty_coef",))
def dppo(
    batch: TokenBatch,
    *,
    probability_low: ProbabilityLow = 0.2,
    probability_high: ProbabilityHigh = 0.2,
    penalty_coef: PullBack = 1e-3,
) -> LossResult:
    """DPPO: a trust region on probabilities instead of ratios, with a weak pull back (Qi et al.
    2026, arXiv:2602.04879, with the penalty that prime-rl adds).

        dropped where A > 0 and p - q > probability_high, or A <= 0 and p - q < -probability_low
        loss = -A * rho (kept) or 0 (dropped), + penalty_coef * (log rho)^2 for every token

    p = exp(log_prob), q = exp(behavior_log_prob). A rare token may change its ratio a lot before
    its probability moves.
    """
    change = probability_change(batch)
    dropped = torch.where(
        batch.masked_advantage > 0.0, change > probability_high, change < -probability_low
    )
    return pulled_back(batch, dropped, penalty_coef)
