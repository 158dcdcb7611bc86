"""Check CISPO against numbers worked out by hand."""

import math

import pytest
import torch
from loss_batches import (
    batch_of,
    gradient,
    loss_of,
    row,
)


def test_cispo_bounds_the_weight_and_keeps_every_gradient() -> None:
    batch = batch_of((8.0, 0.1), (1.0, -2.0))
    losses, diagnostics = loss_of("cispo")(batch)
    torch.testing.assert_close(losses, row(-5.0 * math.log(8.0), 0.1 * 2.0 * math.log(0.1)))
    torch.testing.assert_close(gradient(loss_of("cispo"), batch), row(-5.0, 0.2))
    assert diagnostics.metrics()["clip_fraction"] == pytest.approx(0.5)
