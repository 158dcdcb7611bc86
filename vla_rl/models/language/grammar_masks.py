"""Tokens that grammars forbade in recorded replies, so that training matches sampling."""

from collections.abc import Sequence

import torch
from torch import Tensor

from vla_rl.engines.device_lane import to_device
from vla_rl.engines.sampling import Vocabulary, forbidden
from vla_rl.models.language.token_scores import Forbidden


def tokens_forbidden_in(
    replies: Sequence[Tensor],
    grammars: Sequence[Sequence[tuple[int, int, str]]],
    vocabulary: Vocabulary,
    *,
    width: int,
    device: torch.device,
) -> Forbidden:
    """Return which tokens were forbidden at the flattened positions of [B, width] replies.

    Args:
        replies: tokens of each reply, int64 [T].
        grammars: parts (start, stop, grammar) of each reply that were sampled under a grammar.
        vocabulary: the tokenizer's tokens.
        width: positions of a reply, padding included.
        device: device of the masks.
    """
    ruled = [
        (row * width + start, vocabulary.allowed_masks(grammar, replies[row][start:stop].tolist()))
        for row, parts in enumerate(grammars)
        for start, stop, grammar in parts
    ]
    num_logits = vocabulary.num_logits

    def found(first: int, end: int) -> Tensor | None:
        if not ruled:
            return None
        is_forbidden = torch.zeros((end - first, num_logits), dtype=torch.bool, device=device)
        for start, masks in ruled:
            low, high = max(first, start), min(end, start + len(masks))
            if low < high:
                part = to_device(masks[low - start : high - start], device)
                is_forbidden[low - first : high - first] = forbidden(part, num_logits)
        return is_forbidden

    return found
