"""Losses that keep the exact importance-weighted gradient inside a trust region, and drop tokens
outside it.
"""

import torch
from torch import Tensor

from vla_rl.algorithms.losses.diagnostics import Diagnostics, diagnose
from vla_rl.algorithms.losses.ratio_levels import token_log_ratio
from vla_rl.algorithms.losses.token_batch import TokenBatch


def dppo(
    batch: TokenBatch, *, probability_low: float, probability_high: float, penalty_coef: float
) -> tuple[Tensor, Diagnostics]:
    """DPPO: a trust region on probabilities instead of ratios, with a weak pull back (Qi et al.
    2026, arXiv:2602.04879, with the penalty that prime-rl adds).

        dropped where A > 0 and p - q > probability_high, or A <= 0 and p - q < -probability_low
        loss = -A * rho (kept) or 0 (dropped), + penalty_coef * (log rho)^2 for every token

    p = exp(log_prob), q = exp(behavior_log_prob). A rare token may change its ratio a lot before
    its probability moves.
    """
    change = _probability_change(batch)
    dropped = torch.where(
        batch.masked_advantage > 0.0, change > probability_high, change < -probability_low
    )
    return _pulled_back(batch, dropped, penalty_coef)


def ipo(
    batch: TokenBatch, *, probability_low: float, probability_high: float, penalty_coef: float
) -> tuple[Tensor, Diagnostics]:
    """IPO: the trust region of `dppo` on both sides, whatever the advantage, with the same pull
    back (prime-rl's `ipo`).

        dropped if p - q > probability_high or p - q < -probability_low
        loss = -A * rho (kept) or 0 (dropped), + penalty_coef * (log rho)^2 for every token

    prime-rl has one threshold, 0.1, for both sides. `penalty_coef=0.0` turns the pull back off.
    """
    change = _probability_change(batch)
    return _pulled_back(
        batch, (change > probability_high) | (change < -probability_low), penalty_coef
    )


def icepop(
    batch: TokenBatch, *, weight_low: float, weight_high: float
) -> tuple[Tensor, Diagnostics]:
    """IcePop: the ratio as a weight, 0 outside an interval (Ling team 2025, arXiv:2510.18855).

    loss = -A * rho   where weight_low <= rho <= weight_high, else 0
    """
    ratio = token_log_ratio(batch).detach().exp()
    return _masked_importance(batch, (ratio < weight_low) | (ratio > weight_high))


def m2po(batch: TokenBatch, *, max_second_moment: float) -> tuple[Tensor, Diagnostics]:
    """M2PO: drop the farthest tokens until the second moment of the log-ratio is small (Zheng et
    al. 2025, arXiv:2510.01161).

        loss = -A * rho for the largest set of nearest tokens with mean (log rho)^2 <= max_second_moment, else 0

    The moment is that of the batch from which tokens are chosen: the whole mini-batch if a learner
    passes its choice as `TokenBatch.chosen_tokens`, else the loss's own batch.
    """
    dropped = batch.chosen_tokens
    if dropped is None:
        dropped = dropped_by_m2po(batch, max_second_moment=max_second_moment)
    return _masked_importance(batch, dropped)


def dropped_by_m2po(batch: TokenBatch, *, max_second_moment: float) -> Tensor:
    """Return the tokens that `m2po` leaves out, bool [B, T]; anything where masked."""
    squares = torch.where(batch.mask, token_log_ratio(batch).detach().square(), torch.inf).flatten()
    ascending, order = squares.sort(stable=True)
    moments = ascending.cumsum(0) / torch.arange(1, len(ascending) + 1, device=squares.device)
    dropped = torch.zeros_like(batch.mask).flatten()
    dropped[order] = ~(moments <= max_second_moment)
    return dropped.reshape(batch.mask.shape)


def _pulled_back(
    batch: TokenBatch, dropped: Tensor, penalty_coef: float
) -> tuple[Tensor, Diagnostics]:
    """Compute the loss without the dropped tokens, and add the squared log-ratio of every token,
    dropped ones included.
    """
    losses, diagnostics = _masked_importance(batch, dropped)
    return losses + penalty_coef * token_log_ratio(batch).square(), diagnostics


def _masked_importance(batch: TokenBatch, dropped: Tensor) -> tuple[Tensor, Diagnostics]:
    log_ratio = token_log_ratio(batch)
    kept = batch.mask & ~dropped
    losses = torch.where(kept, -batch.masked_advantage * log_ratio.exp(), 0.0)
    return losses, diagnose(log_ratio, batch.mask, dropped=dropped)


def _probability_change(batch: TokenBatch) -> Tensor:
    behavior = batch.constant("behavior_log_prob", "a trust region on probabilities")
    return batch.masked_log_prob.detach().exp() - behavior.exp()
