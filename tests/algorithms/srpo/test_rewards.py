"""SRPO's rewards: what is compared with what, what is refused, and successes carried over."""

import math

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from vla_rl.algorithms import BankedTask, ReferenceBank, SrpoConfig, srpo_rewards
from vla_rl.errors import ConfigError
from vla_rl.learner.checkpoint.state import pack, unpack

PAPER, RELEASED, ALIGNED = (SrpoConfig(rule=rule) for rule in ("paper", "released", "aligned"))
ALL = [PAPER, RELEASED, ALIGNED]


def rewards_of(points, successes, config, tasks=None, **more):
    tasks = ["task"] * len(points) if tasks is None else tasks
    return srpo_rewards(
        np.array(points, dtype=np.float32), np.array(successes, dtype=bool), tasks, config, **more
    )


def sigmoid(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x))


def test_the_paper_rule_by_hand() -> None:
    # one reference at 1; distances 1, 2, 3 squared: 1, 4, 9; mean 14/3; variance 98/9 (population),
    # std 3.299832
    rewards = rewards_of([[1.0], [2.0], [3.0], [4.0]], [1, 0, 0, 0], PAPER)
    std = math.sqrt(98 / 9)
    expected = [1.0, *(0.8 * sigmoid(-(d - 14 / 3) / std) for d in (1.0, 4.0, 9.0))]
    np.testing.assert_allclose(rewards, expected, rtol=1e-6)
    np.testing.assert_allclose(rewards, [1.0, 0.601877, 0.440269, 0.169562], atol=1e-6)


def test_the_released_rule_by_hand() -> None:
    rewards = rewards_of([[1.0], [2.0], [3.0], [5.0]], [1, 0, 0, 0], RELEASED)
    # distances 1, 2, 4 become 0, 1/3, 1
    np.testing.assert_allclose(
        rewards, [1.0, 0.595984, 0.6 * sigmoid(10 * (0.5 - 1 / 3)), 0.004016], atol=1e-6
    )


@pytest.mark.parametrize(("config", "reward"), [(PAPER, 0.4), (RELEASED, 0.3)])
@pytest.mark.parametrize("failures", [[[2.0, 1.0]], [[2.0, 1.0], [1.0, 2.0], [0.0, 1.0]]])
def test_a_single_failure_and_equally_far_failures_get_the_middle(config, reward, failures) -> None:
    rewards = rewards_of([[1.0, 1.0], *failures], [1] + [0] * len(failures), config)
    np.testing.assert_allclose(rewards, [1.0] + [reward] * len(failures), atol=1e-6)


@pytest.mark.parametrize("config", ALL)
def test_without_a_success_failures_get_nothing_and_without_a_failure_all_get_one(config) -> None:
    assert rewards_of([[1.0], [2.0]], [0, 0], config).tolist() == [0.0, 0.0]
    assert rewards_of([[1.0], [2.0]], [1, 1], config).tolist() == [1.0, 1.0]
    assert srpo_rewards(np.empty((0, 0, 0), np.float32), np.empty(0, bool), [], config).shape == (
        0,
    )


@pytest.mark.parametrize("config", ALL)
def test_a_success_of_another_task_is_no_reference(config) -> None:
    rewards = rewards_of([[1.0], [2.0], [3.0]], [1, 0, 0], config, tasks=["a", "b", "b"])
    assert rewards.tolist() == [1.0, 0.0, 0.0]


@pytest.mark.parametrize("config", ALL)
def test_successes_carried_over_serve_tasks_without_one_and_no_others(config) -> None:
    points, tasks = [[5.0], [1.0], [2.0], [9.0], [8.0]], ["a", "b", "b", "a", "a"]
    carried = {"a": np.array([[[0.0]]], np.float32), "b": np.array([[[1.0]]], np.float32)}
    alone = rewards_of(points, [1, 0, 0, 0, 0], config, tasks)
    helped = rewards_of(points, [1, 0, 0, 0, 0], config, tasks, carried=carried)
    assert alone[1:3].tolist() == [0.0, 0.0]
    assert helped[1] > helped[2] > 0.0
    assert helped[[0, 3, 4]].tolist() == alone[[0, 3, 4]].tolist()


def test_two_ways_to_succeed_are_two_references_unless_the_released_settings_merge_them() -> None:
    # successes in two tight modes; one failure sits in a mode, the other half-way between them
    points = [[1.0, 0.0], [1.0, 1.0], [101.0, 0.0], [101.0, 1.0], [101.0, 0.5], [51.0, 0.5]]
    successes = [1, 1, 1, 1, 0, 0]
    for config in (PAPER, ALIGNED, SrpoConfig(rule="paper", clusters="hdbscan")):
        rewards = rewards_of(points, successes, config)
        assert rewards[4] > rewards[5]
    released = rewards_of(points, successes, RELEASED)
    assert released[4] < released[5]  # its one reference is the mean of all, where nobody succeeded


def test_under_the_released_rule_an_embedding_of_zeros_scores_nothing_and_is_no_reference() -> None:
    rewards = rewards_of([[0.0], [0.0], [1.0], [2.0], [4.0]], [1, 0, 1, 0, 0], RELEASED)
    np.testing.assert_allclose(rewards, [0.0, 0.0, 1.0, 0.595984, 0.004016], atol=1e-6)


@pytest.mark.parametrize("rule", ["paper", "aligned"])
def test_alpha_weighs_the_failures_and_zero_is_the_plain_success_reward(rule) -> None:
    points, successes = [[1.0], [2.0], [3.0]], [1, 0, 0]
    half, whole = (
        rewards_of(points, successes, SrpoConfig(rule=rule, alpha=alpha)) for alpha in (0.5, 1.0)
    )
    np.testing.assert_allclose(half[1:] * 2, whole[1:], rtol=1e-6)
    assert rewards_of(points, successes, SrpoConfig(rule=rule, alpha=0.0)).tolist() == [
        1.0,
        0.0,
        0.0,
    ]


def test_even_with_alpha_one_no_failure_earns_what_a_success_does() -> None:
    # of 400 failures 399 are far and one is at the reference: its z-score is sqrt(399), sigmoid 1 -
    # 2e-9, 1.0 in float32
    points = [[0.0], [0.0], *[[1.0]] * 399]
    for rule in ("paper", "aligned"):
        rewards = rewards_of(points, [1] + [0] * 400, SrpoConfig(rule=rule, alpha=1.0))
        assert rewards[0] == 1.0
        assert rewards[1:].max() < 1.0


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    num=st.integers(1, 16),
    moments=st.integers(1, 4),
    rule=st.sampled_from(["paper", "released", "aligned"]),
    clusters=st.sampled_from(["k_distance", "hdbscan"]),
)
def test_rewards_do_not_depend_on_the_order_to_the_last_bit(
    seed, num, moments, rule, clusters
) -> None:
    rng = np.random.default_rng(seed)
    points = rng.normal(size=(num, moments, 3)).astype(np.float32)
    successes = rng.random(num) < 0.5
    tasks = rng.choice(["a", "b"], num)
    order = rng.permutation(num)
    config = SrpoConfig(rule=rule, clusters=clusters)
    rewards = srpo_rewards(points, successes, list(tasks), config)
    moved = srpo_rewards(points[order], successes[order], list(tasks[order]), config)
    assert moved.tolist() == rewards[order].tolist()
    assert (rewards[successes] == 1.0).all()
    assert ((rewards[~successes] >= 0.0) & (rewards[~successes] <= 0.8)).all()


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    factor=st.sampled_from([1e-3, 0.5, 7.0, 1e4]),
    rule=st.sampled_from(["paper", "aligned"]),
)
def test_the_unit_of_the_embedding_does_not_matter(seed, factor, rule) -> None:
    rng = np.random.default_rng(seed)
    points = rng.normal(size=(9, 3, 4)).astype(np.float32)
    successes = np.arange(9) < 4
    config = SrpoConfig(rule=rule)
    rewards = srpo_rewards(points, successes, ["a"] * 9, config)
    scaled = srpo_rewards((points * factor).astype(np.float32), successes, ["a"] * 9, config)
    np.testing.assert_allclose(scaled, rewards, atol=1e-4)


@pytest.mark.parametrize("config", ALL)
def test_a_nearer_failure_earns_more(config) -> None:
    points = [[0.5], *([float(x)] for x in range(1, 8))]
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
    with pytest.raises(ValueError, match=r"\[3\], expected \[N, T, D\]"):
        srpo_rewards(np.zeros(3, np.float32), np.zeros(3, bool), ["a"] * 3, PAPER)


def test_successes_carried_over_from_another_encoder_are_refused() -> None:
    carried = {"a": np.zeros((1, 8, 4), np.float32)}
    with pytest.raises(
        ValueError,
        match=r"carried over for task 'a' are \[8, 4\], this update's embeddings \[1, 3\]",
    ):
        srpo_rewards(
            np.zeros((2, 3), np.float32), np.zeros(2, bool), ["a", "a"], PAPER, carried=carried
        )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rule": "papr"}, "did you mean 'paper'"),
        ({"clusters": "kdistance"}, "did you mean 'k_distance'"),
        ({"alpha": 1.5}, "SrpoConfig.alpha is 1.5"),
        ({"radius_scale": 0.0}, "SrpoConfig.radius_scale is 0.0"),
        ({"carry_over": -1}, "SrpoConfig.carry_over is -1"),
    ],
)
def test_a_config_out_of_range_is_refused(fields, message) -> None:
    with pytest.raises(ConfigError, match=message):
        SrpoConfig(**fields)


def vectors(*numbers: float) -> np.ndarray:
    return np.array(numbers, np.float32).reshape(-1, 1, 1)


def filled(size: int = 2) -> ReferenceBank:
    bank = ReferenceBank(size)
    bank.add_successes(3, vectors(1, 2, 3), np.array([True, True, False]), ["a", "b", "a"])
    bank.add_successes(5, vectors(4, 5), np.array([True, True]), ["a", "a"])
    return bank


NOBODY = np.array([False, False, False])


def test_the_oldest_success_of_a_task_goes_first_and_failures_are_never_kept() -> None:
    kept = filled(size=2).references(["a", "b", "c"], NOBODY)
    assert {task: row.ravel().tolist() for task, row in kept.items()} == {
        "a": [4.0, 5.0],
        "b": [2.0],
    }
    assert filled(size=3).references(["a"], NOBODY[:1])["a"].ravel().tolist() == [1.0, 4.0, 5.0]


def test_a_task_with_a_success_of_its_own_asks_for_nothing() -> None:
    kept = filled().references(["a", "b", "b"], np.array([True, False, False]))
    assert list(kept) == ["b"]


def test_a_bank_of_size_zero_keeps_nothing() -> None:
    bank = filled(size=0)
    assert bank.references(["a", "b"], NOBODY[:2]) == {}
    assert bank.state() == {}
    assert bank.metrics(9) == {"reward/bank_size": 0.0}


def test_the_metrics_show_how_old_the_references_are() -> None:
    # kept are: task a from update 5 twice, task b from update 3; at update 7 that is 2, 2 and 4
    # updates ago
    assert filled().metrics(7) == {
        "reward/bank_size": 3.0,
        "reward/bank_age_mean": pytest.approx(8 / 3),
        "reward/bank_age_max": 4.0,
    }


def test_an_update_that_is_made_again_takes_the_place_of_what_it_left() -> None:
    bank = filled(size=4)
    bank.add_successes(5, vectors(4, 5), np.array([True, True]), ["a", "a"])
    assert bank.references(["a"], NOBODY[:1])["a"].ravel().tolist() == [1.0, 4.0, 5.0]


def test_a_restored_bank_goes_on_as_the_saved_one_would_have() -> None:
    bank, copy = filled(), ReferenceBank(2)
    copy.restore(unpack(pack(bank.state()), dict[str, BankedTask]))
    for each in (bank, copy):
        each.add_successes(6, vectors(7), np.array([True]), ["a"])
    assert copy.metrics(8) == bank.metrics(8)
    assert copy.references(["a"], NOBODY[:1])["a"].ravel().tolist() == [5.0, 7.0]


def test_a_smaller_bank_keeps_the_newest_of_what_is_restored() -> None:
    small = ReferenceBank(1)
    small.restore(filled().state())
    assert small.references(["a"], NOBODY[:1])["a"].ravel().tolist() == [5.0]


def test_the_bank_owns_what_it_keeps() -> None:
    bank, mine = ReferenceBank(1), vectors(1)
    bank.add_successes(0, mine, np.array([True]), ["a"])
    mine[:] = 9.0
    assert bank.references(["a"], NOBODY[:1])["a"].ravel().tolist() == [1.0]
    assert all(
        isinstance(value, np.ndarray)
        for value in msgspec.structs.asdict(bank.state()["a"]).values()
    )


def test_a_negative_size_is_refused() -> None:
    with pytest.raises(ValueError, match="size is -1"):
        ReferenceBank(-1)
