"""GMPO: the geometric mean of ratios that are clipped token by token."""

from typing import Annotated

from vla_rl.algorithms.lazy_torch import Tensor, torch
from vla_rl.algorithms.losses.declaration import LossResult, Parameter, declare_loss
from vla_rl.algorithms.losses.diagnostics import diagnose
from vla_rl.algorithms.losses.ratio_levels import (
    MAX_SEQUENCE_LOG_RATIO,
    sequence_mean,
    token_log_ratio,
)
from vla_rl.algorithms.losses.token_batch import TokenBatch


def _bounded(log_ratio: Tensor, advantage: Tensor, clip_low: float, clip_high: float) -> Tensor:
    return torch.where(
        advantage >= 0.0, log_ratio.clamp(max=clip_high), log_ratio.clamp(min=-clip_low)
    )


@declare_loss("gmpo", is_of_sequences=True, averaged=_bounded)
def gmpo(
    batch: TokenBatch,
    *,
    clip_low: Annotated[
        float, Parameter("lower bound of the log-ratio, as a positive number.", least=0.0)
    ] = 0.4,
    clip_high: Annotated[float, Parameter("upper bound of the log-ratio.", least=0.0)] = 0.4,
) -> LossResult:
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
    bounded = _bounded(log_ratio, advantage, clip_low, clip_high)
    clipped = (bounded != log_ratio).detach()
    # value of the mean, gradient of the own token: rows of one sequence may be in different
    # micro-batches, and only so do their gradients add up to that of the whole sequence
    in_token_form = sequence_mean(batch, bounded) + bounded - bounded.detach()
    in_token_form = in_token_form.clamp(max=MAX_SEQUENCE_LOG_RATIO)
    losses = torch.where(batch.mask, -advantage * in_token_form.exp(), 0.0)
    return losses, diagnose(log_ratio, batch.mask, level_log_ratio=in_token_form, clipped=clipped)
