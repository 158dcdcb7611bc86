"""SRPO's rules: how far a failure retraced a success, the released code's numbers, clusters of successes."""

import math

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from vla_rl.algorithms import SrpoConfig, srpo_rewards
from vla_rl.algorithms.srpo.rules import (
    aligned_rewards,
    cluster_centres,
    released_centres,
    released_rewards,
    usual_step,
)

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


def released_reward(
    embeddings: list[list[float]], successes: list[bool], tasks: list[str]
) -> list[float]:
    """Rewards of one batch, step by step as the released function goes."""
    scores = [0.0] * len(embeddings)
    for task in set(tasks):
        rows = [
            i
            for i in range(len(tasks))
            if tasks[i] == task and any(x != 0.0 for x in embeddings[i])
        ]
        won, lost = [i for i in rows if successes[i]], [i for i in rows if not successes[i]]
        for i in won:
            scores[i] = 1.0
        if not won or not lost:
            continue
        centres = centres_of([embeddings[i] for i in won])
        distances = {i: min(math.dist(embeddings[i], centre) for centre in centres) for i in lost}
        low, high = min(distances.values()), max(distances.values())
        for i in lost:
            scaled = 0.5 if high - low < 1e-6 else (distances[i] - low) / (high - low)
            scores[i] = 0.6 / (1.0 + math.exp(-10.0 * (0.5 - scaled)))
    return scores


def centres_of(points: list[list[float]]) -> list[list[float]]:
    columns = list(zip(*points, strict=True))
    means = [sum(column) / len(column) for column in columns]
    spreads = [
        math.sqrt(sum((x - m) ** 2 for x in column) / len(column)) or 1.0
        for column, m in zip(columns, means, strict=True)
    ]
    scaled = [
        [(x - m) / s for x, m, s in zip(point, means, spreads, strict=True)] for point in points
    ]
    # DBSCAN with min_samples 2: whoever has a neighbour within 0.5 belongs to a cluster, and
    # neighbours share theirs
    cluster = list(range(len(points)))
    for i in range(len(points)):
        for j in range(i):
            if math.dist(scaled[i], scaled[j]) <= 0.5:
                cluster = [cluster[j] if c == cluster[i] else c for c in cluster]
    members = [[k for k in range(len(points)) if cluster[k] == c] for c in sorted(set(cluster))]
    clusters = [rows for rows in members if len(rows) >= 2] or [list(range(len(points)))]
    return [
        [sum(points[k][d] for k in rows) / len(rows) for d in range(len(means))]
        for rows in clusters
    ]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("spread", [0.05, 1.0])
def test_the_released_rule_equals_the_released_function(seed: int, spread: float) -> None:
    rng = np.random.default_rng(seed)
    num, dims = int(rng.integers(2, 24)), int(rng.integers(1, 6))
    # a small spread around two modes makes clusters; a large one makes none
    points = rng.integers(0, 2, (num, 1)) * 4.0 + spread * rng.normal(size=(num, dims))
    points[rng.random(num) < 0.1] = 0.0
    embeddings = points.astype(np.float32)
    successes, tasks = (
        rng.random(num) < 0.5,
        [f"libero_goal_task_{k}" for k in rng.integers(0, 2, num)],
    )
    expected = released_reward(embeddings.astype(float).tolist(), successes.tolist(), tasks)
    rewards = srpo_rewards(embeddings, successes, tasks, SrpoConfig(rule="released"))
    np.testing.assert_allclose(rewards, expected, atol=1e-6)


def test_failures_closer_to_each_other_than_a_millionth_are_tied_and_others_are_ranked() -> None:
    successes = np.zeros((1, 1))
    for apart, expected in ((0.9e-6, [0.3, 0.3]), (1.1e-6, [0.595984, 0.004016])):
        found = released_rewards(successes, np.array([[1.0], [1.0 + apart]]))
        np.testing.assert_allclose(found, expected, atol=1e-6)
    # exactly at the threshold they are ranked
    found = released_rewards(successes, np.array([[0.0], [1e-6]]))
    np.testing.assert_allclose(found, [0.595984, 0.004016], atol=1e-6)


def test_the_oracle_itself_knows_the_published_constants() -> None:
    tasks = ["libero_goal_task_3"] * 4
    scores = released_reward([[1.0], [2.0], [3.0], [5.0]], [True, False, False, False], tasks)
    assert scores[1] == pytest.approx(0.595984, abs=1e-6)
    assert scores[3] == pytest.approx(0.004016, abs=1e-6)
    assert released_reward([[1.0], [2.0]], [True, False], tasks[:2])[1] == pytest.approx(0.3)


def centres(points, clusters="k_distance", radius_scale=1.5):
    return cluster_centres(np.array(points, dtype=float), clusters, radius_scale).tolist()


def test_the_radius_follows_the_scale_of_the_data() -> None:
    modes = np.array([[0.0], [1.0], [100.0], [101.0]])
    # nearest neighbours are all 1 apart, so the radius is 1.5: two clusters
    assert sorted(centres(modes)) == [[0.5], [100.5]]
    np.testing.assert_allclose(sorted(centres(modes * 1e-6)), [[0.5e-6], [100.5e-6]])
    assert centres(modes, radius_scale=100.0) == [[50.5]]


def test_the_radius_is_the_median_of_the_nearest_distances_and_not_their_mean_or_least() -> None:
    # nearest distances 1, 1, 1.4, 1.4, 50: median 1.4, mean 10.96, least 1
    points = [[0.0], [1.0], [10.0], [11.4], [61.4]]
    assert centres(points, radius_scale=1.01) == [[0.5], [10.7], [61.4]]
    # 0 and 1 are neighbours only within the radius; a scale of 7 makes it 9.8, which joins 1 and 10
    assert centres(points, radius_scale=7.0) == [[5.6], [61.4]]
    # of an even number the median lies between the middle two: nearest distances 1, 1, 3, 3 give 2
    assert centres([[0.0], [1.0], [10.0], [13.0]], radius_scale=1.4) == [[0.5], [10.0], [13.0]]
    assert centres([[0.0], [1.0], [10.0], [13.0]], radius_scale=1.6) == [[0.5], [11.5]]


def test_a_lone_success_is_a_reference_of_its_own() -> None:
    # nearest distances 1, 1, 49: the median 1 gives radius 1.5, so 50 belongs to no cluster
    assert centres([[0.0], [1.0], [50.0]]) == [[0.5], [50.0]]
    assert centres([[3.0]]) == [[3.0]]


@pytest.mark.parametrize("clusters", ["k_distance", "hdbscan"])
def test_identical_successes_are_one_reference(clusters) -> None:
    assert centres([[2.0, 1.0]] * 3, clusters) == [[2.0, 1.0]]
    assert released_centres(np.array([[2.0, 1.0]] * 3)).tolist() == [[2.0, 1.0]]


@pytest.mark.parametrize("clusters", ["k_distance", "hdbscan"])
def test_two_modes_of_many_successes_are_two_references(clusters) -> None:
    rng = np.random.default_rng(0)
    modes = np.concatenate([rng.normal(0.0, 1.0, (20, 2)), rng.normal(50.0, 1.0, (20, 2))])
    found = np.array(sorted(centres(modes, clusters, radius_scale=4.0)))
    for mode in (0.0, 50.0):
        near = found[np.abs(found - mode).max(axis=1) < 5.0]
        assert len(near)
    assert not ((found > 10.0) & (found < 40.0)).any()


@pytest.mark.parametrize("num", [2, 3])
def test_a_handful_of_successes_suffices_for_hdbscan(num) -> None:
    found = np.array(centres([[float(k)] for k in range(num)], "hdbscan"))
    assert 1 <= len(found) <= num


def test_released_clusters_form_only_for_near_duplicates() -> None:
    # standardised, 0 and 0.1 lie within 0.5 of each other, and so do 10 and 10.1
    found = released_centres(np.array([[0.0], [0.1], [10.0], [10.1]]))
    np.testing.assert_allclose(np.sort(found[:, 0]), [0.05, 10.05])
    many_dimensions = np.random.default_rng(0).normal(size=(8, 1408))
    np.testing.assert_allclose(
        released_centres(many_dimensions), many_dimensions.mean(axis=0, keepdims=True)
    )
