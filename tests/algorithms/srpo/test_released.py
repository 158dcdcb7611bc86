"""The released rule against a second reading of the released code, written in plain Python from its
description.
"""

import math

import numpy as np
import pytest

from vla_rl.algorithms import SrpoConfig, srpo_rewards
from vla_rl.algorithms.srpo.rules import released_rewards


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
