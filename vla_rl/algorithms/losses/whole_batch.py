"""Quantities of a whole mini-batch, so that a loss does not depend on the micro-batches.

They are the ratios of sequences that span several rows, and choices of tokens.
"""

import dataclasses

from vla_rl.algorithms.lazy_torch import Tensor
from vla_rl.algorithms.losses.config import PolicyLossConfig
from vla_rl.algorithms.losses.ratio_levels import ratios
from vla_rl.algorithms.losses.sequences_of_rows import SequencesOfRows
from vla_rl.algorithms.losses.token_batch import TokenBatch


def sequence_log_ratio(config: PolicyLossConfig, batch: TokenBatch, sequence: Tensor) -> Tensor:
    """Compute `TokenBatch.sequence_log_ratio` over a whole mini-batch at once.

    It is needed for sequences that span several rows.

    Args:
        config: the loss that needs it. GMPO's mean is over clipped log-ratios; with a correction,
            and for decoupled_ppo, ratios are against `proximal_log_prob`.
        batch: all rows of the mini-batch, with the current policy's log-probs, and the
            `correction_weight` of the update if there is one; its own `sequence_log_ratio` is not
            read.
        sequence: int64 [B], id of the sequence that each row belongs to.

    Returns: float [B, 1], constant.
    """
    if config.needs_proximal:
        proximal = batch.constant("proximal_log_prob", f"the sequence ratio of {config.name!r}")
        batch = dataclasses.replace(batch, behavior_log_prob=proximal)
    by_token = ratios(batch).token_log_ratio.detach()
    if config.declared is not None and config.declared.averaged is not None:
        by_token = config.declared.averaged(by_token, batch.masked_advantage, **config.parameters)
    return SequencesOfRows(batch.mask, sequence).means(by_token, batch.counted)


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
    assert config.declared is not None
    assert config.declared.choose_tokens is not None, config.name
    return config.declared.choose_tokens(batch, **config.parameters)
