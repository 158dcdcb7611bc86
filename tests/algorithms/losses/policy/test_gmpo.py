"""Check GMPO against numbers worked out by hand."""

import math

import pytest
import torch
from loss_batches import (
    batch_of,
    loss_of,
    row,
)


def test_gmpo_clips_each_ratio_before_the_geometric_mean() -> None:
    # A > 0: log-ratios min(log 2, 0.4) = 0.4 and min(log 0.5, 0.4) = log 0.5
    losses, diagnostics = loss_of("gmpo")(batch_of((2.0, 0.5), (1.0, 1.0)))
    expected = -math.exp((0.4 + math.log(0.5)) / 2)
    torch.testing.assert_close(losses, row(expected, expected))
    assert diagnostics.metrics()["clip_fraction"] == pytest.approx(0.5)
    # A < 0: max(log 2, -0.4) = log 2 and max(log 0.5, -0.4) = -0.4
    losses, _ = loss_of("gmpo")(batch_of((2.0, 0.5), (-1.0, -1.0)))
    expected = math.exp((math.log(2.0) - 0.4) / 2)
    torch.testing.assert_close(losses, row(expected, expected))
