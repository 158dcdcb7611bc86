"""SAPO: a soft gate instead of a clip."""

from typing import Annotated

from vla_rl.algorithms.lazy_torch import torch
from vla_rl.algorithms.losses.declaration import Level, LossResult, Parameter, declare_loss
from vla_rl.algorithms.losses.diagnostics import diagnose
from vla_rl.algorithms.losses.ratio_levels import ratios
from vla_rl.algorithms.losses.token_batch import TokenBatch


@declare_loss("sapo")
def sapo(
    batch: TokenBatch,
    *,
    temperature_positive: Annotated[
        float,
        Parameter("steepness of the soft gate for tokens with a positive advantage.", above=0.0),
    ] = 1.0,
    temperature_negative: Annotated[
        float,
        Parameter(
            "steepness of the soft gate for tokens with a negative or zero advantage.", above=0.0
        ),
    ] = 1.05,
    level: Level = "token",
) -> LossResult:
    """SAPO: a soft gate instead of a clip (Gao et al. 2025, arXiv:2511.20347).

        loss = -A * sigmoid(tau * (rho - 1)) * 4 / tau
        tau = temperature_positive where A > 0, else temperature_negative

    At rho = 1 the gradient is the plain policy gradient; it fades on both sides, faster for
    negative advantages.
    """
    rho = ratios(batch, level)
    advantage = batch.masked_advantage
    # a tensor for one of them: torch.where makes float32 of two Python numbers
    temperature = torch.where(
        advantage > 0.0, torch.full_like(advantage, temperature_positive), temperature_negative
    )
    # sigmoid(tau * x) has the slope tau / 4 at 0: the factor 4 / tau makes the gradient at ratio 1
    # the plain policy gradient, whatever the temperature
    gate = torch.sigmoid(temperature * (rho.ratio - 1.0)) * 4.0 / temperature
    losses = torch.where(batch.mask, -advantage * gate * rho.share, 0.0)
    return losses, diagnose(rho.token_log_ratio, batch.mask, level_log_ratio=rho.log_ratio)
