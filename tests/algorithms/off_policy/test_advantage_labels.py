"""RECAP's returns, advantages and labels. Numbers by hand."""

import numpy as np
import pytest

from vla_rl.algorithms import off_policy


def test_a_success_costs_its_steps_and_a_failure_more_than_the_longest_success() -> None:
    success = off_policy.normalised_returns(3, is_success=True, longest=5)
    failure = off_policy.normalised_returns(5, is_success=False, longest=5)
    np.testing.assert_allclose(success, [-0.2, -0.1, 0.0])
    np.testing.assert_allclose(failure, [-0.9, -0.8, -0.7, -0.6, -0.5], rtol=1e-6)
    cheap = off_policy.normalised_returns(2, is_success=False, longest=5, failure_cost=0.0)
    np.testing.assert_allclose(cheap, [-0.2, 0.0])
    assert failure.dtype == np.float32


def test_an_advantage_looks_n_steps_ahead_and_at_the_end_at_the_return() -> None:
    returns = np.array([-0.4, -0.3, -0.2, -0.1], np.float32)
    values = np.array([-0.5, -0.2, -0.6, -0.1], np.float32)
    found = off_policy.n_step_advantages(returns, values, num_steps=2)
    # -0.4 + 0.2 - 0.6 + 0.5; -0.3 + 0.1 - 0.1 + 0.2; -0.2 + 0.6; -0.1 + 0.1
    np.testing.assert_allclose(found, [-0.3, -0.1, 0.4, 0.0], atol=1e-6)
    longer = off_policy.n_step_advantages(returns, values, num_steps=50)
    np.testing.assert_allclose(longer, returns - values, atol=1e-7)


def test_values_that_are_right_leave_no_advantage() -> None:
    returns = off_policy.normalised_returns(40, is_success=False, longest=60)
    for num_steps in (1, 7, 50):
        found = off_policy.n_step_advantages(returns, returns, num_steps=num_steps)
        np.testing.assert_allclose(found, 0.0, atol=1e-7)


def test_smoothing_averages_what_follows_with_weights_that_decay() -> None:
    advantages = np.array([1.0, 0.0, 4.0], np.float32)
    found = off_policy.smooth_advantages(advantages, decay=0.5, window=2)
    np.testing.assert_allclose(found, [1.0 / 1.5, 2.0 / 1.5, 4.0], rtol=1e-6)
    whole = off_policy.smooth_advantages(advantages, decay=0.5, window=50)
    np.testing.assert_allclose(whole[0], (1.0 + 0.0 + 1.0) / 1.75, rtol=1e-6)
    np.testing.assert_allclose(
        off_policy.smooth_advantages(advantages, decay=0.5, window=1), advantages
    )


def test_the_top_share_of_each_task_is_positive_and_so_are_demonstrations() -> None:
    scores = np.array([0.1, 0.9, 0.5, 0.2, -3.0, -1.0, -2.0, -9.0])
    tasks = np.array([0, 0, 0, 0, 1, 1, 1, 1])
    always = np.array([False] * 7 + [True])
    found = off_policy.label_advantages(scores, tasks, always, positive_share=0.3)
    # 0.3 of four steps is rounded up to two; the second task's best are bad and still its best
    assert found.tolist() == [False, True, True, False, False, True, True, True]
    none = off_policy.label_advantages(scores, tasks, always, positive_share=0.0)
    assert none.tolist() == always.tolist()


def test_of_equal_scores_the_first_are_chosen() -> None:
    found = off_policy.label_advantages(
        np.zeros(4), np.zeros(4, np.int64), np.zeros(4, np.bool_), positive_share=0.5
    )
    assert found.tolist() == [True, True, False, False]


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        (
            lambda: off_policy.normalised_returns(6, is_success=True, longest=5),
            "num_steps is 6, expected 1 to longest, 5",
        ),
        (
            lambda: off_policy.normalised_returns(1, is_success=True, longest=5, failure_cost=-1.0),
            r"failure_cost is -1\.0, expected",
        ),
        (
            lambda: off_policy.n_step_advantages(np.zeros(3), np.zeros((3, 1)), num_steps=1),
            r"returns are \[3\], values \[3, 1\]; expected \[T\] of both",
        ),
        (
            lambda: off_policy.n_step_advantages(np.zeros(3), np.zeros(3), num_steps=0),
            "num_steps is 0, expected at least 1",
        ),
        (
            lambda: off_policy.smooth_advantages(np.zeros(3), decay=1.5, window=2),
            r"decay is 1\.5, window 2; expected",
        ),
        (
            lambda: off_policy.label_advantages(
                np.array([np.nan]), np.zeros(1), np.zeros(1), positive_share=0.3
            ),
            "a score is NaN or infinite",
        ),
        (
            lambda: off_policy.label_advantages(
                np.zeros(1), np.zeros(1), np.zeros(1), positive_share=1.3
            ),
            r"positive_share is 1\.3, expected a share from 0 to 1",
        ),
        (
            lambda: off_policy.label_advantages(
                np.zeros(2), np.zeros(1), np.zeros(2), positive_share=0.3
            ),
            r"scores, tasks and always are \[\[2\], \[1\], \[2\]\], expected \[N\] of each",
        ),
    ],
)
def test_what_does_not_fit_is_refused(call, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        call()
