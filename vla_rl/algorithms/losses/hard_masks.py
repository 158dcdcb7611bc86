"""The importance-weighted gradient inside a trust region; tokens outside it are dropped.

Shared by `dppo`, `ipo`, `icepop` and `m2po`.
"""

from typing import Annotated, TypeAlias

from vla_rl.algorithms.lazy_torch import Tensor, torch
from vla_rl.algorithms.losses.declaration import LossResult, Parameter
from vla_rl.algorithms.losses.diagnostics import diagnose
from vla_rl.algorithms.losses.ratio_levels import token_log_ratio
from vla_rl.algorithms.losses.token_batch import TokenBatch

ProbabilityLow: TypeAlias = Annotated[
    float,
    Parameter(
        "drop a token if its probability fell by more than this; 1 keeps every token.", least=0.0
    ),
]
ProbabilityHigh: TypeAlias = Annotated[
    float,
    Parameter(
        "drop a token if its probability rose by more than this; 1 keeps every token.", least=0.0
    ),
]
PullBack: TypeAlias = Annotated[
    float, Parameter("weight of the squared log-ratio on all tokens.", least=0.0)
]


def pulled_back(batch: TokenBatch, dropped: Tensor, penalty_coef: float) -> LossResult:
    """Compute the loss without the dropped tokens, plus the squared log-ratio of every token."""
    losses, diagnostics = masked_importance(batch, dropped)
    return losses + penalty_coef * token_log_ratio(batch).square(), diagnostics


def masked_importance(batch: TokenBatch, dropped: Tensor) -> LossResult:
    """Compute -A * rho for the tokens that are not dropped."""
    log_ratio = token_log_ratio(batch)
    kept = batch.mask & ~dropped
    losses = torch.where(kept, -batch.masked_advantage * log_ratio.exp(), 0.0)
    return losses, diagnose(log_ratio, batch.mask, dropped=dropped)


def probability_change(batch: TokenBatch) -> Tensor:
    """Compute by how much the probability of each token has changed: float [B, T], constant."""
    behavior = batch.constant("behavior_log_prob", "a trust region on probabilities")
    return batch.masked_log_prob.detach().exp() - behavior.exp()
