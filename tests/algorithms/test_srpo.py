"""SRPO rewards: both rules by hand, references per task, and what makes the released rule degenerate."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vla_rl.algorithms import SrpoConfig, srpo_rewards
from vla_rl.algorithms.srpo_references import paper_centres, released_centres
from vla_rl.errors import ConfigError

PAPER, RELEASED = SrpoConfig(rule="paper"), SrpoConfig(rule="released")


def rewards_of(points, successes, config, tasks=None):
    tasks = ["task"] * len(points) if tasks is None else tasks
    return srpo_rewards(np.array(points, dtype=np.float32), np.array(successes, dtype=bool), tasks, config)


def sigmoid(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x))


def test_the_paper_rule_by_hand() -> None:
    # one reference at 1; distances 1, 2, 3 squared: 1, 4, 9; mean 14/3; variance 98/9 (population), std 3.299832
    rewards = rewards_of([[1.0], [2.0], [3.0], [4.0]], [1, 0, 0, 0], PAPER)
    std = math.sqrt(98 / 9)
    expected = [1.0, *(0.8 * sigmoid(-(d - 14 / 3) / std) for d in (1.0, 4.0, 9.0))]
    np.testing.assert_allclose(rewards, expected, rtol=1e-6)
    np.testing.assert_allclose(rewards, [1.0, 0.601877, 0.440269, 0.169562], atol=1e-6)


def test_the_released_rule_by_hand() -> None:
    rewards = rewards_of([[1.0], [2.0], [3.0], [5.0]], [1, 0, 0, 0], RELEASED)
    # distances 1, 2, 4 become 0, 1/3, 1
    np.testing.assert_allclose(rewards, [1.0, 0.595984, 0.6 * sigmoid(10 * (0.5 - 1 / 3)), 0.004016], atol=1e-6)


@pytest.mark.parametrize(("config", "reward"), [(PAPER, 0.4), (RELEASED, 0.3)])
@pytest.mark.parametrize("failures", [[[2.0, 1.0]], [[2.0, 1.0], [1.0, 2.0], [0.0, 1.0]]])
def test_a_single_failure_and_equally_far_failures_get_the_middle(config, reward, failures) -> None:
    rewards = rewards_of([[1.0, 1.0], *failures], [1] + [0] * len(failures), config)
    np.testing.assert_allclose(rewards, [1.0] + [reward] * len(failures), atol=1e-6)


@pytest.mark.parametrize("config", [PAPER, RELEASED])
def test_without_a_success_failures_get_nothing_and_without_a_failure_all_get_one(config) -> None:
    assert rewards_of([[1.0], [2.0]], [0, 0], config).tolist() == [0.0, 0.0]
    assert rewards_of([[1.0], [2.0]], [1, 1], config).tolist() == [1.0, 1.0]
    assert srpo_rewards(np.empty((0, 4), np.float32), np.empty(0, bool), [], config).shape == (0,)


@pytest.mark.parametrize("config", [PAPER, RELEASED])
def test_a_success_of_another_task_is_no_reference(config) -> None:
    rewards = rewards_of([[1.0], [2.0], [3.0]], [1, 0, 0], config, tasks=["a", "b", "b"])
    assert rewards.tolist() == [1.0, 0.0, 0.0]


def test_two_ways_to_succeed_are_two_references_under_the_paper_rule_only() -> None:
    # successes in two tight modes; one failure sits in a mode, the other half-way between them
    points = [[1.0, 0.0], [1.0, 1.0], [101.0, 0.0], [101.0, 1.0], [101.0, 0.5], [51.0, 0.5]]
    successes = [1, 1, 1, 1, 0, 0]
    paper, released = rewards_of(points, successes, PAPER), rewards_of(points, successes, RELEASED)
    assert paper[4] > paper[5]
    assert released[4] < released[5]  # its one reference is the mean of all, where nobody succeeded


def test_the_radius_follows_the_scale_of_the_data() -> None:
    modes = np.array([[0.0], [1.0], [100.0], [101.0]])
    # nearest neighbours are all 1 apart, so the radius is 1.5: two clusters
    assert paper_centres(modes, 1.5).tolist() == [[0.5], [100.5]]
    assert paper_centres(modes * 1e-6, 1.5).tolist() == pytest.approx(np.array([[0.5e-6], [100.5e-6]]))
    assert paper_centres(modes, 100.0).tolist() == [[50.5]]


def test_a_lone_success_is_a_reference_of_its_own() -> None:
    # nearest distances 1, 1, 49: the median 1 gives radius 1.5, so 50 belongs to no cluster
    assert paper_centres(np.array([[0.0], [1.0], [50.0]]), 1.5).tolist() == [[0.5], [50.0]]
    assert paper_centres(np.array([[3.0]]), 1.5).tolist() == [[3.0]]


def test_identical_successes_are_one_reference() -> None:
    assert paper_centres(np.array([[2.0, 1.0]] * 3), 1.5).tolist() == [[2.0, 1.0]]
    assert released_centres(np.array([[2.0, 1.0]] * 3)).tolist() == [[2.0, 1.0]]


def test_released_clusters_form_only_for_near_duplicates() -> None:
    # standardised, 0 and 0.1 lie within 0.5 of each other, and so do 10 and 10.1
    centres = released_centres(np.array([[0.0], [0.1], [10.0], [10.1]]))
    np.testing.assert_allclose(np.sort(centres[:, 0]), [0.05, 10.05])
    many_dimensions = np.random.default_rng(0).normal(size=(8, 1408))
    np.testing.assert_allclose(released_centres(many_dimensions), many_dimensions.mean(axis=0, keepdims=True))


def test_under_the_released_rule_an_embedding_of_zeros_scores_nothing_and_is_no_reference() -> None:
    rewards = rewards_of([[0.0], [0.0], [1.0], [2.0], [4.0]], [1, 0, 1, 0, 0], RELEASED)
    np.testing.assert_allclose(rewards, [0.0, 0.0, 1.0, 0.595984, 0.004016], atol=1e-6)


def test_alpha_weighs_the_failures_and_zero_is_the_plain_success_reward() -> None:
    points, successes = [[1.0], [2.0], [3.0]], [1, 0, 0]
    half, whole = (rewards_of(points, successes, SrpoConfig(alpha=alpha)) for alpha in (0.5, 1.0))
    np.testing.assert_allclose(half[1:] * 2, whole[1:])
    assert rewards_of(points, successes, SrpoConfig(alpha=0.0)).tolist() == [1.0, 0.0, 0.0]


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), num=st.integers(1, 16), rule=st.sampled_from(["paper", "released"]))
def test_rewards_do_not_depend_on_the_order_and_no_failure_beats_a_success(seed, num, rule) -> None:
    rng = np.random.default_rng(seed)
    points = rng.normal(size=(num, 3)).astype(np.float32)
    successes = rng.random(num) < 0.5
    tasks = rng.choice(["a", "b"], num)
    order = rng.permutation(num)
    rewards = srpo_rewards(points, successes, list(tasks), SrpoConfig(rule=rule))
    moved = srpo_rewards(points[order], successes[order], list(tasks[order]), SrpoConfig(rule=rule))
    np.testing.assert_allclose(moved, rewards[order], atol=1e-5)
    assert (rewards[successes] == 1.0).all()
    assert ((rewards[~successes] >= 0.0) & (rewards[~successes] <= 0.8)).all()


def test_a_nearer_failure_earns_more() -> None:
    points = [[0.5], *([float(x)] for x in range(1, 8))]
    for config in (PAPER, RELEASED):
        assert (np.diff(rewards_of(points, [1] + [0] * 7, config)[1:]) < 0.0).all()


def test_an_embedding_that_is_not_finite_is_refused_with_its_episode() -> None:
    points = np.array([[1.0], [np.nan]], dtype=np.float32)
    with pytest.raises(ValueError, match=r"episode 42 \(task 'b'\) is not finite"):
        srpo_rewards(points, np.array([True, False]), ["a", "b"], PAPER, episode_ids=[41, 42])
    with pytest.raises(ValueError, match="row 1"):
        srpo_rewards(points, np.array([True, False]), ["a", "b"], PAPER)


def test_inputs_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="2 embeddings, 1 is_success, 2 tasks"):
        srpo_rewards(np.zeros((2, 3), np.float32), np.array([True]), ["a", "a"], PAPER)
    with pytest.raises(ValueError, match=r"\[3\], expected \[N, D\]"):
        srpo_rewards(np.zeros(3, np.float32), np.zeros(3, bool), ["a"] * 3, PAPER)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rule": "papr"}, "did you mean 'paper'"),
        ({"alpha": 1.5}, "SrpoConfig.alpha is 1.5"),
        ({"radius_scale": 0.0}, "SrpoConfig.radius_scale is 0.0"),
    ],
)
def test_a_config_out_of_range_is_refused(fields, message) -> None:
    with pytest.raises(ConfigError, match=message):
        SrpoConfig(**fields)
