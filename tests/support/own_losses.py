"""Policy losses of one's own, as a configuration names them: "own_losses:nan_loss"."""

import itertools
import os
import signal
import threading
from pathlib import Path
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


def fails_as_the_file_says(batch: TokenBatch) -> tuple[Tensor, Diagnostics]:
    """The clipped surrogate, but on rank 1 each call takes a line out of FAILURES_FILE, and fails so."""
    path = Path(os.environ.get("FAILURES_FILE", ""))
    shared = torch.distributed.is_initialized()
    if shared and path.is_file() and torch.distributed.get_rank() == 1:
        how, _, later = path.read_text().partition("\n")
        path.write_text(later)
        if how == "RuntimeError":
            raise RuntimeError("the device is gone")
        if how.startswith("SIG"):
            os.kill(os.getpid(), signal.Signals[how])
    return plain(batch)
