"""Covariance of log-prob and advantage, by which `clip_cov` and `kl_cov` choose tokens.

They slow the decay of entropy at the tokens where it decays fastest: those of high covariance.

    cov_t = (A_t - mean A) * (log_prob_t - mean log_prob)

Cui et al. 2025, "The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models",
arXiv:2505.22617. Means and shares are those of the batch from which tokens are chosen. A learner
chooses from a whole mini-batch and passes the choice as `TokenBatch.chosen_tokens`, so that the
gradient does not depend on the micro-batches; without it, the loss chooses from the tokens of its
own batch. The metric `covariance` always uses the means of the loss's own batch.
"""

from typing import Annotated, TypeAlias

from vla_rl.algorithms.lazy_torch import Tensor, torch
from vla_rl.algorithms.losses.declaration import Parameter
from vla_rl.algorithms.losses.token_batch import TokenBatch

CovarianceShare: TypeAlias = Annotated[
    float,
    Parameter("share of the tokens that is clipped or penalised, in [0, 1].", least=0.0, most=1.0),
]


def token_covariance(batch: TokenBatch) -> Tensor:
    """Return each token's share of the covariance of log-prob and advantage.

    float [B, T], constant, 0 where masked.
    """
    log_prob, advantage = batch.masked_log_prob.detach(), batch.masked_advantage
    count = batch.mask.sum().clamp(min=1)
    centred = (advantage - advantage.sum() / count) * (log_prob - log_prob.sum() / count)
    return torch.where(batch.mask, centred, 0.0)


def num_chosen(batch: TokenBatch, share: float) -> Tensor:
    """Return the number of tokens that a share is, int64 []; at least one if the share is above 0.

    It stays on the device, as all that is chosen by it: a count read on the host would wait for the
    device in every micro-batch.
    """
    count = (share * batch.mask.sum().double()).long()
    return count.clamp(min=1) if share > 0.0 else count
