"""The aligned rule by hand: what is retraced counts, in order, however long it took."""

import math

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from vla_rl.algorithms import SrpoConfig
from vla_rl.algorithms.srpo.rules import aligned_rewards, usual_step

WHOLE = SrpoConfig(rule="aligned", alpha=1.0)


def moments(*rows: list[float]) -> np.ndarray:
    """[N, T, 1] from one list of numbers for each trajectory."""
    return np.array(rows, dtype=float)[..., None]


def share(reference: list[float], failure: list[float]) -> float:
    return float(aligned_rewards(moments(reference), moments(failure), WHOLE)[0])


def near(steps: float) -> float:
    """Closeness of two moments so many widths apart."""
    return math.exp(-0.5 * steps**2)


def test_a_failure_that_stops_half_way_has_retraced_half_and_a_little() -> None:
    # the success moves by 1 each moment, so that is the width; the last two moments are 1 and 2
    # away from where it stopped
    assert share([0, 1, 2, 3], [0, 1, 1, 1]) == pytest.approx((1 + 1 + near(1) + near(2)) / 4)
    assert share([0, 1, 2, 3], [0, 1, 2, 3]) == pytest.approx(1.0)


def test_a_slower_or_a_hesitant_failure_loses_nothing() -> None:
    assert share([0, 10, 20, 30], [0, 0, 10, 10]) == share([0, 10, 20, 30], [0, 10, 10, 10])
    assert share([0, 10, 20, 20], [0, 10, 10, 20]) == pytest.approx(1.0)


def test_what_is_done_in_the_wrong_order_does_not_count_twice() -> None:
    # backwards, only one moment can be matched exactly, the others are 10 or 20 widths of 10 away:
    # 1 and 2 of them
    assert share([0, 10, 20], [20, 10, 0]) == pytest.approx((1 + near(1) + near(1)) / 3)


def test_the_nearest_way_to_succeed_is_the_one_that_counts() -> None:
    left, right = [0.0, -10.0, -20.0], [0.0, 10.0, 20.0]
    both = aligned_rewards(moments(left, right), moments([0, 10, 10], [0, -10, -20]), WHOLE)
    # the mean of both ways stands still at 0, where nobody succeeded
    np.testing.assert_allclose(both, [(1 + 1 + near(1)) / 3, 1.0])


def test_a_reward_does_not_depend_on_the_other_failures() -> None:
    reference = moments([0, 1, 2, 3])
    together = aligned_rewards(reference, moments([0, 1, 1, 1], [9, 9, 9, 9], [0, 0, 0, 0]), WHOLE)
    alone = aligned_rewards(reference, moments([0, 1, 1, 1]), WHOLE)
    assert together[0] == alone[0]


def test_the_width_is_the_usual_step_of_the_successes() -> None:
    # steps 1, 3, 0 and 2, 2, 8: the positive ones are 1, 2, 2, 3, 8
    assert usual_step(moments([0, 1, 4, 4], [0, 2, 4, 12]), moments([0, 0, 0, 0])) == 2.0
    # successes of one moment: distances between them; one success: distance from the failures;
    # nothing at all: 1
    assert usual_step(moments([0], [3]), moments([9])) == 3.0
    assert usual_step(moments([0]), moments([9])) == 9.0
    assert usual_step(moments([0]), moments([0])) == 1.0


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), num_moments=st.integers(1, 5))
def test_the_fast_sum_equals_trying_every_order(seed: int, num_moments: int) -> None:
    rng = np.random.default_rng(seed)
    references, failure = rng.normal(size=(2, num_moments, 2)), rng.normal(size=(num_moments, 2))
    width = usual_step(references, failure[None])

    def best(reference: np.ndarray, first: int, start: int) -> float:
        if first == num_moments:
            return 0.0
        return max(
            near(float(np.linalg.norm(failure[t] - reference[first])) / width)
            + best(reference, first + 1, t)
            for t in range(start, num_moments)
        )

    expected = max(best(reference, 0, 0) for reference in references) / num_moments
    assert aligned_rewards(references, failure[None], WHOLE)[0] == pytest.approx(expected)
