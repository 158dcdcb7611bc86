"""KL-Cov: the unclipped surrogate, with a penalty on the tokens of the highest covariance."""

from typing import Annotated

from vla_rl.algorithms.lazy_torch import Tensor, torch
from vla_rl.algorithms.losses.covariance import (
    CovarianceShare,
    num_chosen,
    token_covariance,
)
from vla_rl.algorithms.losses.declaration import LossResult, Parameter, declare_loss
from vla_rl.algorithms.losses.diagnostics import diagnose
from vla_rl.algorithms.losses.ratio_levels import token_log_ratio
from vla_rl.algorithms.losses.token_batch import TokenBatch


def penalised_by_kl_cov(
    batch: TokenBatch, *, covariance_share: float, penalty_coef: float
) -> Tensor:
    """Return the tokens that `kl_cov` penalises, bool [B, T]; `penalty_coef` does not matter."""
    ranked = torch.where(batch.mask, token_covariance(batch), -torch.inf).flatten()
    order = ranked.argsort(stable=True)
    wanted = torch.minimum(num_chosen(batch, covariance_share), batch.mask.sum())
    chosen = torch.zeros_like(batch.mask).flatten()
    chosen[order] = torch.arange(len(order), device=order.device) >= len(order) - wanted
    return chosen.reshape(batch.mask.shape)


@declare_loss(
    "kl_cov",
    has_trust_region=False,
    choose_tokens=penalised_by_kl_cov,
    terms_without_advantage=("penalty_coef",),
)
def kl_cov(
    batch: TokenBatch,
    *,
    covariance_share: CovarianceShare = 2e-4,
    penalty_coef: Annotated[
        float, Parameter("weight of |log-ratio| on the chosen tokens.", least=0.0)
    ] = 1.0,
) -> LossResult:
    """Compute the unclipped surrogate, with a penalty on the tokens of the highest covariance.

        loss = -A * rho, + penalty_coef * |log rho| for the covariance_share with the largest cov (at least one token)

    Nothing bounds the ratio of the other tokens.
    """
    log_ratio = token_log_ratio(batch)
    penalised = batch.chosen_tokens
    if penalised is None:
        penalised = penalised_by_kl_cov(
            batch, covariance_share=covariance_share, penalty_coef=penalty_coef
        )
    losses = -batch.masked_advantage * log_ratio.exp()
    losses = torch.where(penalised, losses + penalty_coef * log_ratio.abs(), losses)
    losses = torch.where(batch.mask, losses, 0.0)
    extra = {"covariance": token_covariance(batch), "penalised_fraction": penalised.float()}
    return losses, diagnose(log_ratio, batch.mask, extra=extra)
