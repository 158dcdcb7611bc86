"""Which rows go through the network together."""

import torch
from torch import Tensor

from vla_rl.engines.config import MicroBatchSize
from vla_rl.engines.lines import placed


def micro_batches(num_read: Tensor, size: MicroBatchSize) -> list[Tensor]:
    """Indices of each micro-batch, int64 [M], M >= 1; together every row once.

    Without a limit of tokens, rows stay in order. With one, the longest rows come first; a micro-batch has lines as wide as
    its longest row, as many as the limit allows, and shorter rows share lines (`vla_rl.engines.lines`). A row that is
    longer than the limit goes alone.

    Args:
        num_read: int64 [N], tokens that a forward pass reads for each row.
        size: most rows, and most tokens.
    """
    if size.tokens is None:
        return list(torch.split(torch.arange(len(num_read)), size.rows))
    parts: list[Tensor] = []
    order = torch.argsort(num_read, descending=True, stable=True)
    while len(order):
        width = max(int(num_read[order[0]]), 1)
        places = placed(num_read[order].tolist(), width, max(1, size.tokens // width))
        fits = torch.tensor([place is not None for place in places])
        fits &= fits.cumsum(0) <= size.rows
        parts.append(order[fits])
        order = order[~fits]
    return parts
