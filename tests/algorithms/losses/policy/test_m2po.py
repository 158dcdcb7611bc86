"""Check M2PO against numbers worked out by hand."""

import math

import pytest
import torch
from loss_batches import (
    batch_of,
    loss_of,
    row,
)


def test_m2po_drops_the_farthest_tokens_until_the_second_moment_is_small() -> None:
    # squared log-ratios 0.01, 0.04, 0.25: means 0.01, 0.025, 0.1
    batch = batch_of((math.exp(0.5), math.exp(-0.1), math.exp(0.2)), (1.0, 1.0, 1.0))
    losses, diagnostics = loss_of("m2po", max_second_moment=0.03)(batch)
    torch.testing.assert_close(losses, row(0.0, -math.exp(-0.1), -math.exp(0.2)))
    assert diagnostics.metrics()["dropped_fraction"] == pytest.approx(1 / 3)
    kept, _ = loss_of("m2po", max_second_moment=0.11)(batch)
    assert (kept != 0.0).all()
