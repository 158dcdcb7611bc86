"""Policy losses of one's own, as a configuration names them: "own_losses:nan_loss"."""

import itertools
import threading
from typing import Any

import torch
from torch import Tensor

from vla_rl.algorithms.losses import Diagnostics, TokenBatch, clipped_surrogate

num_calls = itertools.count(1)
reached = threading.Event()
go_on = threading.Event()


def plain(batch: TokenBatch) -> tuple[Tensor, Diagnostics]:
    """The clipped surrogate with the default bounds."""
    return clipped_surrogate(batch, clip_low=0.2, clip_high=0.28)


def nan_loss(batch: TokenBatch) -> tuple[Tensor, Diagnostics]:
    """NaN everywhere."""
    losses, diagnostics = plain(batch)
    return losses * torch.nan, diagnostics


def second_micro_batch_waits(batch: TokenBatch) -> Any:
    """The clipped surrogate; its second call waits for `go_on`."""
    if next(num_calls) == 2:
        reached.set()
        go_on.wait(30)
    return plain(batch)


def nan_of_large_advantages(batch: TokenBatch) -> tuple[Tensor, Diagnostics]:
    """The clipped surrogate, but NaN for rows whose advantage is above 10."""
    losses, diagnostics = plain(batch)
    return losses * torch.where(batch.advantage > 10.0, torch.nan, 1.0), diagnostics
