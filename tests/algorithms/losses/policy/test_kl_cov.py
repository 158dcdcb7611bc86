"""Check KL-Cov against numbers worked out by hand."""

import math

import pytest
import torch
from loss_batches import (
    batch_of,
    loss_of,
    row,
)


def test_kl_cov_penalises_the_tokens_of_the_highest_covariance() -> None:
    # means: log-prob 0, advantage 0 -> covariances 2 log 2, -log 2 and 0
    batch = batch_of((2.0, 0.5, 1.0), (2.0, 1.0, -3.0))
    losses, diagnostics = loss_of("kl_cov", covariance_share=0.34, penalty_coef=0.1)(batch)
    torch.testing.assert_close(losses, row(-4.0 + 0.1 * math.log(2), -0.5, 3.0))
    assert diagnostics.metrics()["penalised_fraction"] == pytest.approx(1 / 3)
