"""Mean, best of some, and majority, against numbers worked out by hand."""

import itertools

import numpy as np
import pytest

from vla_rl.evaluation.validation import mean_best_reward, mean_majority_reward, validation_metrics


def test_best_of_all_is_the_maximum_and_best_of_one_the_mean() -> None:
    rewards = np.array([[0.0, 1.0, 0.5], [0.0, 0.0, 0.3]])
    assert mean_best_reward(rewards, 3) == pytest.approx((1.0 + 0.3) / 2)
    assert mean_best_reward(rewards, 1) == pytest.approx(rewards.mean())


def test_best_of_some_is_the_mean_over_all_ways_to_draw_them() -> None:
    rewards = np.random.default_rng(0).random((5, 6))
    for num in range(1, 7):
        drawn = [
            max(row[list(places)])
            for row in rewards
            for places in itertools.combinations(range(6), num)
        ]
        assert mean_best_reward(rewards, num) == pytest.approx(np.mean(drawn))


def test_the_majority_answers_and_of_equals_the_first() -> None:
    rewards = np.array([[1.0, 0.0, 0.0, 1.0], [0.0, 1.0, 1.0, 0.0]])
    assert mean_majority_reward(
        rewards, [["7", "8", "9", "7"], ["1", "2", "2", "1"]]
    ) == pytest.approx((1.0 + 0.0) / 2)


def test_the_figures_have_names_with_their_numbers() -> None:
    rewards = np.array([[1.0, 0.0, 0.0, 0.0, 0.0, 0.0]])
    metrics = validation_metrics(rewards, [["4", "5", "5", "5", "6", "6"]])
    assert metrics == pytest.approx(
        {"mean": 1 / 6, "best@2": 1 / 3, "best@4": 2 / 3, "best@6": 1.0, "maj@6": 0.0}
    )
    assert validation_metrics(np.array([[1.0]])) == {"mean": 1.0}


def test_nothing_to_validate_is_refused() -> None:
    with pytest.raises(ValueError, match=r"rewards are \[0, 4\], expected \[problems, tries\]"):
        validation_metrics(np.zeros((0, 4)))
    with pytest.raises(ValueError, match=r"best@5 of 4 tries, expected 1 to 4"):
        mean_best_reward(np.zeros((1, 4)), 5)
