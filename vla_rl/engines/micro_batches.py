"""Which rows go through the network together."""

import torch
from torch import Tensor

from vla_rl.engines.config import MicroBatchSize


def micro_batches(num_read: Tensor, size: MicroBatchSize) -> list[Tensor]:
    """Indices of each micro-batch, int64 [M], M >= 1; together every row once.

    Without a limit of tokens, rows stay in order. With one, the longest come first and those of like length together, as
    many as fit with their padding; a row that is longer than the limit goes alone.

    Args:
        num_read: int64 [N], tokens that a forward pass reads for each row.
        size: most rows, and most tokens.
    """
    if size.tokens is None:
        return list(torch.split(torch.arange(len(num_read)), size.rows))
    parts: list[Tensor] = []
    order = torch.argsort(num_read, descending=True, stable=True)
    while len(order):
        num_rows = max(1, min(size.rows, size.tokens // max(int(num_read[order[0]]), 1)))
        parts.append(order[:num_rows])
        order = order[num_rows:]
    return parts
