"""Which groups are worth an update."""

import numpy as np
import pytest

from vla_rl.algorithms import (
    OverlongConfig,
    group_advantage,
    has_equal_rewards,
    overlong_filter,
    overlong_penalty,
    require_satisfiable,
    within_accuracy,
)
from vla_rl.errors import ConfigError


@pytest.mark.parametrize(
    ("success_rate", "kept"),
    [(0.0, False), (0.1, True), (0.125, True), (0.875, True), (0.9, True), (1.0, False)],
)
def test_accuracy_bounds_include_both_ends(success_rate, kept) -> None:
    assert within_accuracy(success_rate, 0.1, 0.9) is kept


def test_bounds_from_zero_to_one_keep_every_group() -> None:
    assert within_accuracy(0.0, 0.0, 1.0)
    assert within_accuracy(1.0, 0.0, 1.0)


@pytest.mark.parametrize(
    ("lowest", "highest"), [(0.9, 0.1), (-0.1, 0.5), (0.5, 1.1), (float("nan"), 1.0)]
)
def test_bounds_that_nothing_can_satisfy_are_refused(lowest, highest) -> None:
    with pytest.raises(ConfigError, match="accuracy bounds"):
        within_accuracy(0.5, lowest, highest)


@pytest.mark.parametrize(
    ("rewards", "equal"),
    [([], True), ([1.0], True), ([0.0, 0.0], True), ([0.3, 0.3], True), ([0.0, 0.0, 1.0], False)],
)
def test_equal_rewards_are_recognised(rewards, equal) -> None:
    assert has_equal_rewards(rewards) is equal


def test_rewards_that_differ_in_their_last_digit_are_not_equal_and_still_teach() -> None:
    for rewards in ([0.5, np.nextafter(0.5, 1.0)], [1e-9, 0.0], [1.0, 1.0, 1.0 - 1e-7]):
        assert not has_equal_rewards(rewards)
        assert group_advantage(rewards).any()
    same = [0.1 + 0.2] * 3  # whose mean is not exactly each of them
    assert has_equal_rewards(same)
    assert not group_advantage(same).any()


def test_a_group_of_two_may_differ() -> None:
    assert not has_equal_rewards([0.0, 1.0])


def test_bounds_that_no_group_of_this_size_can_meet_are_refused_with_the_inequality() -> None:
    require_satisfiable(4, 0.25, 0.25)
    with pytest.raises(
        ConfigError, match=r"k / 4 with 0 <= k <= 4, and none has 0.3 <= k / 4 <= 0.45"
    ):
        require_satisfiable(4, 0.3, 0.45)
    require_satisfiable(2, 0.0, 1.0, needs_difference=True)
    with pytest.raises(
        ConfigError, match=r"k / 4 with 1 <= k <= 3, and none has 0.0 <= k / 4 <= 0.2"
    ):
        require_satisfiable(4, 0.0, 0.2, needs_difference=True)
    with pytest.raises(ConfigError, match="no group of 1 can be kept"):
        require_satisfiable(1, 0.0, 1.0, needs_difference=True)


def test_the_overlong_penalty_grows_over_the_buffer_and_no_further() -> None:
    config = OverlongConfig(max_length=100, buffer=20, factor=0.5)
    found = overlong_penalty(np.array([0, 80, 85, 90, 100, 130]), config)
    np.testing.assert_allclose(found, [0.0, 0.0, -0.125, -0.25, -0.5, -0.5])
    assert overlong_penalty(np.array([10_000]), OverlongConfig()).tolist() == [0.0]
    assert overlong_penalty(np.array([]), config).shape == (0,)


@pytest.mark.parametrize("buffer", [0, 101])
def test_a_buffer_that_does_not_fit_is_refused(buffer) -> None:
    with pytest.raises(
        ConfigError, match=rf"buffer is {buffer}, expected 1 <= buffer <= max_length = 100"
    ):
        OverlongConfig(max_length=100, buffer=buffer)


def test_what_was_cut_off_leaves_the_loss_with_all_its_steps() -> None:
    mask = np.array([[True, True, False], [True, True, True]])
    assert overlong_filter(mask, np.array([True, False])).tolist() == [[False] * 3, [True] * 3]
    with pytest.raises(ValueError, match=r"is_truncated is \[3\], expected \[2\]"):
        overlong_filter(mask, np.zeros(3, dtype=bool))
