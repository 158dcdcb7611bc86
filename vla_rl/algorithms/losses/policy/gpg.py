"""GPG: the plain policy gradient."""

from vla_rl.algorithms.lazy_torch import torch
from vla_rl.algorithms.losses.declaration import LossResult, declare_loss
from vla_rl.algorithms.losses.diagnostics import diagnose
from vla_rl.algorithms.losses.ratio_levels import token_log_ratio
from vla_rl.algorithms.losses.token_batch import TokenBatch


@declare_loss("gpg", has_trust_region=False)
def gpg(
    batch: TokenBatch,
) -> LossResult:
    """The plain policy gradient: no ratio at all.

    Williams 1992; Chu et al. 2025, GPG, arXiv:2504.02546.

        loss = -A * log_prob

    For on-policy data only: nothing bounds the step on older data.
    """
    losses = torch.where(batch.mask, -batch.masked_advantage * batch.masked_log_prob, 0.0)
    return losses, diagnose(token_log_ratio(batch), batch.mask)
