"""M2PO: drop the farthest tokens until the second moment of the log-ratio is small."""

from typing import Annotated

from vla_rl.algorithms.lazy_torch import Tensor, torch
from vla_rl.algorithms.losses.declaration import LossResult, Parameter, declare_loss
from vla_rl.algorithms.losses.hard_masks import masked_importance
from vla_rl.algorithms.losses.ratio_levels import token_log_ratio
from vla_rl.algorithms.losses.token_batch import TokenBatch


def dropped_by_m2po(batch: TokenBatch, *, max_second_moment: float) -> Tensor:
    """Return the tokens that `m2po` leaves out, bool [B, T]; anything where masked."""
    squares = torch.where(batch.mask, token_log_ratio(batch).detach().square(), torch.inf).flatten()
    ascending, order = squares.sort(stable=True)
    moments = ascending.cumsum(0) / torch.arange(1, len(ascending) + 1, device=squares.device)
    dropped = torch.zeros_like(batch.mask).flatten()
    dropped[order] = ~(moments <= max_second_moment)
    return dropped.reshape(batch.mask.shape)


@declare_loss("m2po", choose_tokens=dropped_by_m2po)
def m2po(
    batch: TokenBatch,
    *,
    max_second_moment: Annotated[
        float,
        Parameter(
            "drop tokens, those with the largest |log-ratio| first, until the mean squared "
            "log-ratio is at most this.",
            least=0.0,
        ),
    ] = 0.04,
) -> LossResult:
    """M2PO: drop the farthest tokens until the second moment of the log-ratio is small.

    Zheng et al. 2025, arXiv:2510.01161.

        loss = -A * rho for the largest set of nearest tokens with mean (log rho)^2 <= max_second_moment, else 0

    The moment is that of the batch from which tokens are chosen: the whole mini-batch if a learner
    passes its choice as `TokenBatch.chosen_tokens`, else the loss's own batch.
    """
    dropped = batch.chosen_tokens
    if dropped is None:
        dropped = dropped_by_m2po(batch, max_second_moment=max_second_moment)
    return masked_importance(batch, dropped)
