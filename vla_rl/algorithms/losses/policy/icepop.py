"""IcePop: the ratio as a weight, 0 outside an interval."""

from typing import Annotated

from vla_rl.algorithms.losses.declaration import LossResult, Parameter, declare_loss
from vla_rl.algorithms.losses.hard_masks import masked_importance
from vla_rl.algorithms.losses.ratio_levels import token_log_ratio
from vla_rl.algorithms.losses.token_batch import TokenBatch


@declare_loss("icepop", ordered=("weight_low", "weight_high"))
def icepop(
    batch: TokenBatch,
    *,
    weight_low: Annotated[
        float, Parameter("drop tokens whose ratio is below this.", least=0.0)
    ] = 0.5,
    weight_high: Annotated[float, Parameter("drop tokens whose ratio is above this.")] = 5.0,
) -> LossResult:
    """IcePop: the ratio as a weight, 0 outside an interval (Ling team 2025, arXiv:2510.18855).

    loss = -A * rho   where weight_low <= rho <= weight_high, else 0
    """
    ratio = token_log_ratio(batch).detach().exp()
    return masked_importance(batch, (ratio < weight_low) | (ratio > weight_high))
