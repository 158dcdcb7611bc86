"""Check GSPO against numbers worked out by hand."""

import math

import pytest
import torch
from loss_batches import (
    batch_of,
    loss_of,
    row,
)


def test_gspo_clips_the_geometric_mean_of_the_ratios() -> None:
    # ratios 1.21 and 1.0: geometric mean 1.1, for both tokens
    losses, diagnostics = loss_of("gspo", clip_low=0.2, clip_high=0.28)(
        batch_of((1.21, 1.0), (1.0, -1.0))
    )
    torch.testing.assert_close(losses, row(-1.1, 1.1))
    assert diagnostics.metrics()["ratio_mean"] == pytest.approx(1.1)
    clipped, _ = loss_of("gspo")(batch_of((1.21, 1.0), (1.0, -1.0)))  # default range 3e-4, 4e-4
    torch.testing.assert_close(clipped, row(-1.0004, 1.1))


def test_gspo_takes_the_ratio_of_the_whole_sequence_where_it_spans_rows() -> None:
    loss = loss_of("gspo", clip_low=0.5, clip_high=0.5)
    told = torch.full((1, 1), math.log(1.3), dtype=torch.float64)
    losses, _ = loss(batch_of((1.21, 1.0), (1.0, 1.0), sequence_log_ratio=told))
    torch.testing.assert_close(losses, row(-1.3, -1.3))


def test_gspo_is_ppo_at_the_level_of_the_sequence() -> None:
    batch = batch_of((1.3, 0.9, 1.1), (1.0, -1.0, 2.0))
    numbers = {"clip_low": 0.01, "clip_high": 0.02}
    ppo = loss_of("ppo", level="sequence", **numbers)
    torch.testing.assert_close(loss_of("gspo", **numbers)(batch)[0], ppo(batch)[0])
