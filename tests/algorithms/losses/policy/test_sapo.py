"""Check SAPO against numbers worked out by hand."""

import math

import torch
from loss_batches import (
    batch_of,
    loss_of,
    row,
)


def test_sapo_is_a_soft_gate_that_is_steeper_for_bad_tokens() -> None:
    losses, _ = loss_of("sapo")(batch_of((2.0, 2.0, 1.0), (1.0, -1.0, 3.0)))
    good = 4.0 / (1.0 + math.exp(-1.0))
    bad = 4.0 / 1.05 / (1.0 + math.exp(-1.05))
    torch.testing.assert_close(losses, row(-good, bad, -3.0 * 2.0))  # sigmoid(0) * 4 / 1 = 2
