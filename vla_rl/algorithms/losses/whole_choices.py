"""Choices of tokens from a whole mini-batch at once, for losses whose result must not depend on the
micro-batches.
"""

import dataclasses

from torch import Tensor

from vla_rl.algorithms.losses.config import PolicyLossConfig
from vla_rl.algorithms.losses.covariance import dropped_by_clip_cov, penalised_by_kl_cov
from vla_rl.algorithms.losses.hard_masks import dropped_by_m2po
from vla_rl.algorithms.losses.token_batch import TokenBatch


def chosen_tokens(config: PolicyLossConfig, batch: TokenBatch) -> Tensor:
    """Choose `TokenBatch.chosen_tokens` for a loss whose `needs_chosen_tokens` is true.

    Args:
        config: the loss that needs them; with a correction, ratios are against `proximal_log_prob`.
        batch: all rows of the mini-batch, with the current policy's log-probs; its own
            `chosen_tokens` is not read.

    Returns: bool [B, T], anything where masked.
    """
    if config.needs_proximal:
        proximal = batch.constant("proximal_log_prob", f"the choice of tokens of {config.name!r}")
        batch = dataclasses.replace(batch, behavior_log_prob=proximal)
    if config.name == "clip_cov":
        return dropped_by_clip_cov(batch, **config.parameters)
    if config.name == "kl_cov":
        return penalised_by_kl_cov(batch, covariance_share=config.parameters["covariance_share"])
    return dropped_by_m2po(batch, **config.parameters)
