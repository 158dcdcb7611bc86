"""Log-probs and entropies of chosen tokens, without the logits of all positions at one time.

    hidden [N, D] ─► head, temperature, log-softmax ─► log-prob and entropy of N tokens, float32 [N]
                     a chunk of positions at a time; in the backward pass computed once more

For 8,192 positions and 152,000 tokens the logits alone take 5 GB in float32, and their gradient,
softmax and entropy as much again. A chunk's memory depends on neither number.
"""

from collections.abc import Callable
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from vla_rl.algorithms import entropy
from vla_rl.engines.sampling import tempered_log_probs

LOGITS_AT_ONCE: Final = 1 << 26
"""Positions times vocabulary in one chunk: 256 MB of float32 for each tensor of that shape. Fewer
are computed whole, and not twice."""

Forbidden: TypeAlias = Callable[[int, int], Tensor | None]
"""Function of the first position and the one after the last: bool [n, V], True for each token that
could not be chosen there; None if all could."""


def score_tokens(
    head: Callable[[Tensor], Tensor],
    hidden: Tensor,
    chosen: Tensor,
    temperatures: Tensor,
    forbidden: Forbidden,
    *,
    vocab_size: int,
    logits_at_once: int = LOGITS_AT_ONCE,
) -> tuple[Tensor, Tensor]:
    """Return log-probs and entropies, float32 [N] each, with a gradient.

    Args:
        head: maps hidden states [n, D] to logits [n, V].
        hidden: hidden states [N, D], N >= 1.
        chosen: tokens int64 [N].
        temperatures: float32 [N].
        forbidden: tokens whose logits are -inf.
        vocab_size: V.
        logits_at_once: positions times V of one chunk.
    """

    def scored(first: int, hidden: Tensor, chosen: Tensor, temperatures: Tensor) -> Any:
        logits = head(hidden)
        impossible = forbidden(first, first + len(hidden))
        if impossible is not None:
            logits = logits.masked_fill(impossible, -torch.inf)
        log_probs = tempered_log_probs(logits[:, None], temperatures)[:, 0]
        return log_probs.gather(-1, chosen[:, None])[:, 0], entropy(log_probs)

    size = max(1, logits_at_once // vocab_size)
    if len(hidden) <= size:
        whole: tuple[Tensor, Tensor] = scored(0, hidden, chosen, temperatures)
        return whole
    columns = (hidden, chosen, temperatures)
    parts = [
        # nothing is random here, so no random state has to be kept
        checkpoint(scored, first, *chunk, use_reentrant=False, preserve_rng_state=False)
        for first, *chunk in zip(
            range(0, len(hidden), size), *(torch.split(each, size) for each in columns), strict=True
        )
    ]
    log_probs, entropies = (torch.cat(each) for each in zip(*parts, strict=True))
    return log_probs, entropies
