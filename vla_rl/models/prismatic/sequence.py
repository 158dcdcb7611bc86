"""Rows of different lengths as one batch: positions of tokens, and padding masks.

Each row has the same positions as it would have alone: tokens first, padding last.
"""

import torch
from torch import Tensor


def is_token(lengths: Tensor, num_positions: int) -> Tensor:
    """Return bool [B, L]: True for the first `lengths` int64 [B] positions of each row."""
    return torch.arange(num_positions, device=lengths.device) < lengths[:, None]


def both_ways(lengths: Tensor, num_positions: int) -> Tensor:
    """Return the bool [B, 1, 1, L] attention mask: every position sees every token of its row,
    before it or after.
    """
    # one line for all queries: kernels of a GPU add masks as numbers, and a square would be written
    # out for that in each layer
    return is_token(lengths, num_positions)[:, None, None, :]


def insert_tail(rows: Tensor, lengths: Tensor, tail: Tensor, fill: int) -> Tensor:
    """Insert ids `tail` int64 [B, T] right after the first `lengths` ids of `rows` int64 [B, P]:
    int64 [B, P + T].
    """
    width, num_tail = rows.shape[1], tail.shape[1]
    place = torch.arange(width + num_tail, device=rows.device) - lengths[:, None]
    padded = torch.nn.functional.pad(rows, (0, num_tail), value=fill).masked_fill(place >= 0, fill)
    if num_tail == 0:
        return padded
    in_tail = (place >= 0) & (place < num_tail)
    return torch.where(in_tail, tail.gather(1, place.clamp(0, num_tail - 1)), padded)


def consecutive(first: Tensor, num: int) -> Tensor:
    """Return int64 [B, num]: consecutive positions in each row, starting at `first` int64 [B]."""
    return first[:, None] + torch.arange(num, device=first.device)


def gather_rows(rows: Tensor, read: Tensor) -> Tensor:
    """Return [B, T, D]: the entries of `rows` [B, L, D] at the positions `read` int64 [B, T]."""
    return rows.gather(1, read[..., None].expand(-1, -1, rows.shape[2]))
