"""Check GPG against numbers worked out by hand."""

import math

import torch
from loss_batches import (
    batch_of,
    gradient,
    loss_of,
    row,
)


def test_gpg_is_the_log_prob_times_the_advantage() -> None:
    batch = batch_of((2.0, 0.5), (3.0, -1.0))
    torch.testing.assert_close(loss_of("gpg")(batch)[0], row(-3.0 * math.log(2), math.log(0.5)))
    torch.testing.assert_close(gradient(loss_of("gpg"), batch), row(-3.0, 1.0))
