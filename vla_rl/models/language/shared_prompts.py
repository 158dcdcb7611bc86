"""Lines on which rows with an equal prompt share it, for learning.

The episodes of a group begin with the same prompt, which is often most of a row. On one line it is
read once:

    one row each             prompt reply 1 · prompt reply 2 · prompt reply 3
    one line a prompt        prompt reply 1 reply 2 reply 3

    a token of        sees
    the prompt        the prompt up to itself
    a reply           the whole prompt, and its own reply up to itself

The positions of each reply continue those of the prompt, so log-probs and gradients are those of
rows that are read one by one. (Described for RL post-training as shared-prefix or prefix-grouper
attention: Liu et al. 2025, arXiv:2506.05433.)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from vla_rl.engines.device_lane import to_device

PAIRS_OF_A_TOKEN: Final = 2
"""Pairs of positions in a mask, by the width of a hidden state, that take as long as one token. By
arithmetic it is 6; a mask's pairs were taken as three times as dear, because all are computed, those
that are hidden too."""


@dataclass(frozen=True)
class SharedLines:
    """Rows on one line for each distinct prompt, on the host.

    A reply's last token is left out: nothing is read from it.

    Example:
        A prompt of 2 tokens with replies of 3 and 2:

        SharedLines(
            tokens=[[7, 8, 20, 21, 30]], positions=[[0, 1, 2, 3, 2]], replies=[[0, 0, 1, 1, 2]],
            prompt_ends=[1, 1], reply_starts=[2, 4],
        )
    """

    tokens: Tensor
    """int64 [G, W], padded on the right."""

    positions: Tensor
    """Position of each token in its conversation, int64 [G, W]."""

    replies: Tensor
    """Number of the reply that a token belongs to, from 1 on each line; 0 for the prompt. int64
    [G, W]."""

    prompt_ends: Tensor
    """Each row's last prompt token in the flattened lines, int64 [B]."""

    reply_starts: Tensor
    """Each row's first reply token there, int64 [B]."""

    def visible(self, device: torch.device) -> Tensor:
        """Return which positions each sees, bool [G, 1, W, W], on the device."""
        replies = to_device(self.replies, device)
        theirs, own = replies[:, None, :], replies[:, :, None]
        line = torch.arange(self.tokens.shape[1], device=device)
        return (((theirs == 0) | (theirs == own)) & (line <= line[:, None]))[:, None]


def share_prompts(
    prompts: Sequence[np.ndarray], replies: Sequence[Tensor], hidden_size: int
) -> SharedLines | None:
    """Put rows with an equal prompt on one line.

    Args:
        prompts: prompt of each row, int64 [P].
        replies: reply of each row, int64 [T].
        hidden_size: width of the network, which says how many pairs of positions are as dear as a
            token.

    Returns: None if rows of their own cost less. Long replies to a short prompt are such a case:
    the mask grows with the square of a line.
    """
    groups: dict[bytes, list[int]] = {}
    for row, prompt in enumerate(prompts):
        groups.setdefault(prompt.astype(np.int64).tobytes(), []).append(row)
    if len(groups) == len(prompts):
        return None
    inputs = [reply[:-1] for reply in replies]
    widths = [
        len(prompts[rows[0]]) + sum(len(inputs[row]) for row in rows) for rows in groups.values()
    ]
    token = PAIRS_OF_A_TOKEN * hidden_size
    lengths = [len(prompt) + len(reply) for prompt, reply in zip(prompts, replies, strict=True)]
    # rows of their own are causal, so half of their pairs are computed
    alone = sum(length * token + length * length // 2 for length in lengths)
    if len(groups) * max(widths) * (token + max(widths)) >= alone:
        return None
    return _fill_lines(prompts, inputs, list(groups.values()), max(widths))


def _fill_lines(
    prompts: Sequence[np.ndarray],
    inputs: Sequence[Tensor],
    groups: Sequence[Sequence[int]],
    width: int,
) -> SharedLines:
    tokens, positions, replies = (
        torch.zeros(len(groups), width, dtype=torch.long) for _ in range(3)
    )
    prompt_ends, reply_starts = (torch.zeros(len(prompts), dtype=torch.long) for _ in range(2))
    for line, rows in enumerate(groups):
        prompt = torch.from_numpy(prompts[rows[0]])
        start = len(prompt)
        tokens[line, :start], positions[line, :start] = prompt, torch.arange(start)
        for number, row in enumerate(rows, start=1):
            reply, stop = inputs[row], start + len(inputs[row])
            tokens[line, start:stop] = reply
            positions[line, start:stop] = len(prompt) + torch.arange(len(reply))
            replies[line, start:stop] = number
            prompt_ends[row] = line * width + len(prompt) - 1
            reply_starts[row] = line * width + start
            start = stop
    return SharedLines(tokens, positions, replies, prompt_ends, reply_starts)
