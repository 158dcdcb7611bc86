"""Which groups are worth an update."""

import pytest

from vla_rl.algorithms import has_equal_rewards, within_accuracy
from vla_rl.errors import ConfigError


@pytest.mark.parametrize(
    ("success_rate", "kept"), [(0.0, False), (0.1, True), (0.125, True), (0.875, True), (0.9, True), (1.0, False)]
)
def test_accuracy_bounds_include_both_ends(success_rate, kept) -> None:
    assert within_accuracy(success_rate, 0.1, 0.9) is kept


def test_bounds_from_zero_to_one_keep_every_group() -> None:
    assert within_accuracy(0.0, 0.0, 1.0)
    assert within_accuracy(1.0, 0.0, 1.0)


@pytest.mark.parametrize(("lowest", "highest"), [(0.9, 0.1), (-0.1, 0.5), (0.5, 1.1), (float("nan"), 1.0)])
def test_bounds_that_nothing_can_satisfy_are_refused(lowest, highest) -> None:
    with pytest.raises(ConfigError, match="accuracy bounds"):
        within_accuracy(0.5, lowest, highest)


@pytest.mark.parametrize(
    ("rewards", "equal"), [([], True), ([1.0], True), ([0.0, 0.0], True), ([0.3, 0.3], True), ([0.0, 0.0, 1.0], False)]
)
def test_equal_rewards_are_recognised(rewards, equal) -> None:
    assert has_equal_rewards(rewards) is equal
