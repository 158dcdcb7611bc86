"""Check CPGD against numbers worked out by hand."""

import math

import pytest
import torch
from loss_batches import (
    batch_of,
    gradient,
    loss_of,
    row,
)


def test_cpgd_bounds_the_log_ratio_and_weighs_no_gradient() -> None:
    batch = batch_of((2.0, 0.5, 2.0, 0.5), (1.0, 1.0, -1.0, -1.0))
    loss = loss_of("cpgd", drift_coef=0.0)
    bounded = [
        min(math.log(2), math.log(1.2)),
        math.log(0.5),
        -math.log(2),
        -max(math.log(0.5), math.log(0.8)),
    ]
    torch.testing.assert_close(loss(batch)[0], -row(*bounded))
    torch.testing.assert_close(gradient(loss, batch), row(0.0, -1.0, 1.0, 0.0))
    assert loss(batch)[1].metrics()["clip_fraction"] == pytest.approx(0.5)


def test_cpgd_with_a_lower_bound_of_one_has_no_lower_bound() -> None:
    losses, _ = loss_of("cpgd", clip_low=1.0, drift_coef=0.0)(batch_of((0.01,), (-1.0,)))
    torch.testing.assert_close(losses, row(math.log(0.01)))


def test_cpgd_drift_pulls_back_with_the_ratio_minus_one_but_never_harder_than_two() -> None:
    loss = loss_of("cpgd", drift_coef=0.5)
    torch.testing.assert_close(
        gradient(loss, batch_of((2.0, 0.5, 9.0), (0.0, 0.0, 0.0))), row(0.5, -0.25, 1.0)
    )
