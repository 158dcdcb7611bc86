"""Check IcePop against numbers worked out by hand."""

import torch
from loss_batches import (
    batch_of,
    loss_of,
    row,
)


def test_icepop_is_zero_outside_of_its_interval_of_ratios() -> None:
    losses, _ = loss_of("icepop")(batch_of((0.4, 0.6, 4.0, 6.0), (1.0, 1.0, -1.0, -1.0)))
    torch.testing.assert_close(losses, row(0.0, -0.6, 4.0, 0.0))
