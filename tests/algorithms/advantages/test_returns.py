"""Advantages from discounted returns by hand: endings, masked steps, levels, several agents, whitening."""

import numpy as np
import pytest
from hypothesis import given, strategies as st
from small_batches import column, estimate, outcomes

from vla_rl.algorithms import (
    AdvantageConfig,
    Advantages,
    RewardBatch,
    advantage_estimator,
    make_reward_batch,
)
from vla_rl.algorithms.advantages import whiten_values
from vla_rl.types import ActionChunk, EnvSpec, EpisodeSpec, Step, StopReason, Trajectory


def estimate_gae(batch: RewardBatch, name: str = "gae", **changes) -> Advantages:
    return advantage_estimator(AdvantageConfig(name=name, **({"whiten": False} | changes)))(batch)


def episode(rewards, values, **others) -> RewardBatch:
    """One episode that the task ended, every step of which acted."""
    mask = np.ones((1, len(rewards)), dtype=bool)
    fields = {"is_terminated": np.array([True]), "mask": mask} | others
    return RewardBatch(
        rewards=np.zeros(1),
        step_rewards=np.array([rewards], float),
        values=np.array([values], float),
        **fields,
    )


def test_gae_by_hand() -> None:
    # gamma 0.5, lam 0.5: delta = (0 + 0.5 * 2 - 1, 0 + 0.5 * 4 - 2, 8 - 4) = (0, 0, 4); A = (0.25,
    # 1, 4)
    made = estimate_gae(episode([0, 0, 8], [1, 2, 4]), gamma=0.5, lam=0.5)
    assert made.advantage.tolist() == [[0.25, 1.0, 4.0]]
    assert made.returns is not None
    assert made.returns.tolist() == [[1.25, 3.0, 8.0]]


def test_a_time_limit_bootstraps_and_the_tasks_own_end_does_not() -> None:
    cut_off = episode([0, 1], [1, 1], is_terminated=np.array([False]), final_values=np.array([6.0]))
    # delta = (0.5 * 1 - 1, 1 + 0.5 * 6 - 1) = (-0.5, 3); A = (-0.5 + 0.5 * 3, 3)
    assert estimate_gae(cut_off, gamma=0.5, lam=1.0).advantage.tolist() == [[1.0, 3.0]]
    ended = episode([0, 1], [1, 1], final_values=np.array([6.0]))
    assert estimate_gae(ended, gamma=0.5, lam=1.0).advantage.tolist() == [[-0.5, 0.0]]


def test_without_bootstrap_nothing_follows_a_time_limit() -> None:
    cut_off = episode([0, 1], [1, 1], is_terminated=np.array([False]), final_values=np.array([6.0]))
    made = estimate_gae(cut_off, gamma=0.5, lam=1.0, bootstrap=False)
    assert made.advantage.tolist() == [[-0.5, 0.0]]  # as if the task had ended it
    unknown = episode([0, 1], [1, 1], is_terminated=np.array([False]))
    again = estimate_gae(unknown, gamma=0.5, lam=1.0, bootstrap=False)
    assert again.advantage.tolist() == [[-0.5, 0.0]]


def test_an_episode_that_was_cut_off_needs_a_value_of_its_final_observation() -> None:
    batch = episode([0], [1], is_terminated=np.array([False]), episode_ids=np.array([41]))
    with pytest.raises(
        ValueError,
        match=r"episode 41 was cut off by a time limit, but RewardBatch.final_values is None",
    ):
        estimate_gae(batch)


def test_steps_that_did_not_act_are_carried_through() -> None:
    """The same episode with an observation in the middle, whose value is nonsense, gives the same
    advantages.
    """
    plain = estimate_gae(episode([0, 0, 8], [1, 2, 4]), gamma=0.5, lam=0.5)
    mask = np.array([[True, False, True, False, True, False]])
    held = episode([0, 0, 0, 0, 8, 0], [1, 99, 2, np.nan, 4, np.inf], mask=mask)
    made = estimate_gae(held, gamma=0.5, lam=0.5)
    assert made.advantage[mask].tolist() == plain.advantage[0].tolist()
    assert not made.advantage[~mask].any()
    assert made.returns is not None
    assert not made.returns[~mask].any()


def test_an_outcome_sits_on_the_last_step_that_acted() -> None:
    mask = np.array([[True, True, False]])
    batch = RewardBatch(
        rewards=np.array([8.0]), mask=mask, values=np.zeros((1, 3)), is_terminated=np.array([True])
    )
    assert estimate_gae(batch, gamma=0.5, lam=1.0).advantage.tolist() == [[4.0, 8.0, 0.0]]


def test_discounts_are_per_control_step_where_steps_have_durations() -> None:
    # the first chunk ran 2 control steps, the last one 1: V_0 is followed by gamma^2 V_1, the last
    # by gamma V_final
    batch = episode(
        [0, 0],
        [0, 4],
        durations=np.array([[2, 1]]),
        is_terminated=np.array([False]),
        final_values=np.array([8.0]),
    )
    # delta = (0.25 * 4, 0.5 * 8 - 4) = (1, 0)
    assert estimate_gae(batch, gamma=0.5, lam=0.5).advantage.tolist() == [[1.0, 0.0]]


def test_whitening_comes_after_the_returns() -> None:
    made = estimate_gae(episode([0, 0, 8], [1, 2, 4]), gamma=0.5, lam=0.5, whiten=True)
    assert made.returns is not None
    assert made.returns.tolist() == [[1.25, 3.0, 8.0]]
    assert made.advantage.mean() == pytest.approx(0.0, abs=1e-6)
    assert made.advantage.std(ddof=1) == pytest.approx(1.0)


def test_all_masked_and_empty_batches_give_zeros() -> None:
    nothing = RewardBatch(
        rewards=np.ones(2),
        mask=np.zeros((2, 3), bool),
        values=np.full((2, 3), np.nan),
        is_terminated=np.array([True, False]),
        final_values=np.ones(2),
        agents=np.zeros((2, 3), int),
    )
    for name in ("gae", "marft_gae"):
        made = estimate_gae(nothing, name, whiten=True)
        assert not made.advantage.any()
        assert [len(row) for row in made.per_trajectory()] == [0, 0]
    empty = RewardBatch(
        np.zeros(0),
        mask=np.zeros((0, 3), bool),
        values=np.zeros((0, 3)),
        is_terminated=np.zeros(0, bool),
    )
    assert estimate_gae(empty).advantage.shape == (0, 3)


@given(st.lists(st.floats(-2, 2, width=32), min_size=1, max_size=6), st.floats(0.0, 1.0), st.data())
def test_with_lambda_one_the_return_is_the_discounted_sum_and_with_zero_the_one_step_target(
    rewards, gamma, data
) -> None:
    size = len(rewards)
    values = data.draw(st.lists(st.floats(-2, 2, width=32), min_size=size, max_size=size))
    final = data.draw(st.floats(-2, 2, width=32))
    batch = episode(
        rewards, values, is_terminated=np.array([False]), final_values=np.array([final])
    )
    ahead = [*values[1:], final]
    sums = [
        sum(gamma**k * rewards[t + k] for k in range(size - t)) + gamma ** (size - t) * final
        for t in range(size)
    ]
    whole, one_step = (
        estimate_gae(batch, gamma=gamma, lam=1.0),
        estimate_gae(batch, gamma=gamma, lam=0.0),
    )
    assert whole.returns is not None
    np.testing.assert_allclose(whole.returns[0], sums, atol=1e-4)
    assert one_step.returns is not None
    np.testing.assert_allclose(
        one_step.returns[0], np.array(rewards) + gamma * np.array(ahead), atol=1e-4
    )


def test_rows_are_estimated_apart() -> None:
    together = RewardBatch(
        rewards=np.zeros(2),
        mask=np.array([[True, True, True], [True, False, False]]),
        step_rewards=np.array([[0.0, 0, 8], [3, 0, 0]]),
        values=np.array([[1.0, 2, 4], [1, 7, 7]]),
        is_terminated=np.array([True, True]),
    )
    made = estimate_gae(together, gamma=0.5, lam=0.5)
    assert made.advantage.tolist() == [[0.25, 1.0, 4.0], [2.0, 0.0, 0.0]]
    assert [row.tolist() for row in made.returns_per_trajectory()] == [[1.25, 3.0, 8.0], [3.0]]


def test_the_next_value_of_an_agents_last_token_is_the_next_agents_first() -> None:
    # two agents, two turns, one token each: values 1 (a), 2 (b), 4 (a), 8 (b); reward 8 at the end
    batch = episode([0, 0, 0, 8], [1, 2, 4, 8], agents=np.array([[0, 1, 0, 1]]))
    plain, shared = (
        estimate_gae(batch, gamma=0.5, lam=1.0),
        estimate_gae(batch, "marft_gae", gamma=0.5, lam=1.0),
    )
    assert shared.advantage.tolist() == plain.advantage.tolist() == [[0.0, 0.0, 0.0, 0.0]]


def test_several_agents_are_whitened_each_by_itself() -> None:
    batch = episode([0] * 6, [-1, -100, -7, -3, -300, -5], agents=np.array([[0, 1, 2, 0, 1, 2]]))
    # advantages 1, 100, 7, 3, 300, 5
    made = estimate_gae(batch, "marft_gae", gamma=0.0, lam=1.0, whiten=True)
    half = 0.5**0.5
    np.testing.assert_allclose(made.advantage, [[-half, -half, half, half, half, -half]], rtol=1e-5)


def trajectory(stop_reason: StopReason = StopReason.SUCCESS) -> Trajectory:
    """Two decisions of two control steps of two tokens each.

    Success after the first control step of the second.
    """

    def step(rewards: list[float]) -> Step:
        chunk = ActionChunk(
            actions=np.zeros((2, 2), np.float32),
            tokens=np.zeros(4, np.int64),
            log_probs=np.zeros(4, np.float32),
            weight_version=0,
        )
        return Step(observation={}, chunk=chunk, rewards=np.array(rewards, np.float32))

    return Trajectory(
        episode=EpisodeSpec(
            episode_id=5, group_id=3, member=0, env=EnvSpec(id="x"), task="t", seed=0, policy_seed=0
        ),
        steps=(step([0.5, 0.25]), step([1.0])),
        final_observation={},
        stop_reason=stop_reason,
    )


@pytest.mark.parametrize(
    ("level", "rewards", "durations"),
    [
        ("chunk", [0.75, 1.0], [2, 1]),
        ("action", [0.5, 0.25, 1.0], [1, 1, 1]),
        ("token", [0.0, 0.5, 0.0, 0.25, 0.0, 1.0], [0, 1, 0, 1, 0, 1]),
    ],
)
def test_a_step_is_a_decision_a_control_step_or_a_token_and_ends_with_the_episode(
    level, rewards, durations
) -> None:
    batch = make_reward_batch([trajectory()], level=level, values=[np.zeros(len(rewards))])
    assert batch.step_rewards is not None
    assert batch.durations is not None
    assert batch.mask is not None
    assert batch.step_rewards.tolist() == [rewards]
    assert batch.durations.tolist() == [durations]
    assert batch.mask.all()
    assert (batch.rewards.tolist(), batch.num_tokens.tolist()) == ([1.75], [6.0])
    assert (batch.group.tolist(), batch.episode_ids.tolist(), batch.is_terminated.tolist()) == (
        [3],
        [5],
        [True],
    )


def test_every_level_agrees_on_the_return_of_the_first_step() -> None:
    """With a critic that says 0, lam 1, and rewards only at the end of decisions, gamma per control
    step.
    """
    whole = trajectory()
    for level, size in (("action", 3), ("token", 6)):
        made = estimate_gae(
            make_reward_batch([whole], level=level, values=[np.zeros(size)]), gamma=0.5, lam=1.0
        )
        assert made.returns is not None
        assert made.returns[0, 0] == pytest.approx(0.5 + 0.5 * 0.25 + 0.25 * 1.0)
    made = estimate_gae(make_reward_batch([whole], values=[np.zeros(2)]), gamma=0.5, lam=1.0)
    assert made.returns is not None
    # within a decision rewards are not discounted
    assert made.returns[0, 0] == pytest.approx(0.75 + 0.25 * 1.0)


def test_outcomes_that_are_given_replace_the_environments_rewards() -> None:
    batch = make_reward_batch(
        [trajectory(StopReason.TIME_LIMIT)], np.array([0.3]), final_values=np.array([0.0])
    )
    assert batch.step_rewards is None
    assert batch.is_terminated is not None
    assert not batch.is_terminated[0]
    assert batch.rewards_by_step("test").tolist() == [[0.0, 0.3]]


def test_values_of_another_number_of_steps_are_refused_with_the_episode() -> None:
    with pytest.raises(
        ValueError, match=r"values of episode 5 are \[3\], expected \[2\]: one for each step"
    ):
        make_reward_batch([trajectory()], values=[np.zeros(3)])
    with pytest.raises(ValueError, match="2 arrays of values for 1 trajectories"):
        make_reward_batch([trajectory()], values=[np.zeros(2), np.zeros(2)])


def test_no_trajectories_make_an_empty_batch() -> None:
    batch = make_reward_batch([])
    assert len(batch) == 0
    assert advantage_estimator(AdvantageConfig())(batch).per_trajectory() == []


def test_reinforce_plus_plus_whitens_returns_over_the_batch() -> None:
    batch = RewardBatch(
        rewards=np.array([0.0, 0.0]),
        mask=np.array([[True, True, True], [True, False, False]]),
        step_rewards=np.array([[0.0, 0.0, 4.0], [2.0, 0.0, 0.0]]),
    )
    made = estimate("reinforce_plus_plus", batch, gamma=0.5)
    assert made.returns is not None
    assert made.returns.tolist() == [[1.0, 2.0, 4.0], [2.0, 0.0, 0.0]]
    # mean 2.25, variance (1.25^2 + 0.25^2 + 1.75^2 + 0.25^2) / 3 = 4.75 / 3
    expected = np.array([[-1.25, -0.25, 1.75], [-0.25, 0.0, 0.0]]) / (4.75 / 3) ** 0.5
    np.testing.assert_allclose(made.advantage, expected, rtol=1e-6)


def test_steps_that_did_not_act_neither_reset_nor_discount_a_return() -> None:
    batch = RewardBatch(
        rewards=np.array([4.0]),
        mask=np.array([[True, False, False, True]]),
        episode_ids=np.array([3]),
    )
    made = estimate("reinforce_plus_plus", batch, gamma=0.5)
    assert made.returns is not None
    assert made.returns.tolist() == [[2.0, 0.0, 0.0, 4.0]]


def test_the_baseline_variant_centres_by_group_and_scales_over_the_batch() -> None:
    # centred: 1, -1, 0.5, -0.5; variance (1 + 1 + 0.25 + 0.25) / 3
    made = estimate("reinforce_plus_plus_baseline", outcomes([2.0, 0.0, 1.0, 0.0], [0, 0, 1, 1]))
    np.testing.assert_allclose(
        column(made), np.array([1.0, -1.0, 0.5, -0.5]) / (2.5 / 3) ** 0.5, rtol=1e-6
    )


def test_whitening_by_hand_and_where_there_is_nothing_to_scale() -> None:
    mask = np.array([[True, True, False]])
    np.testing.assert_allclose(
        whiten_values(np.array([[1.0, 3.0, np.nan]]), mask), [[-(0.5**0.5), 0.5**0.5, 0.0]]
    )
    assert whiten_values(np.array([[5.0, 5.0, 5.0]]), mask).tolist() == [[0.0, 0.0, 0.0]]
    assert whiten_values(
        np.array([[5.0, 5.0, 5.0]]), np.array([[True, False, False]])
    ).tolist() == [[0.0, 0.0, 0.0]]
    assert whiten_values(np.zeros((0, 3)), np.zeros((0, 3), bool)).shape == (0, 3)


def test_whitening_divides_by_the_root_of_the_variance_and_a_little() -> None:
    mask = np.array([[True, True, False]])
    # 0 and 2e-4: mean 1e-4, variance over n - 1 2e-8
    found = whiten_values(np.array([[0.0, 2e-4, 7.0]]), mask)
    expected = 1e-4 / np.sqrt(2e-8 + 1e-8)
    np.testing.assert_allclose(found, [[-expected, expected, 0.0]])
    # equal values whose mean differs from them by rounding
    assert whiten_values(np.array([[0.1 + 0.2] * 3]), np.ones((1, 3), bool)).tolist() == [[0.0] * 3]
    assert whiten_values(np.array([[5.0, 1.0]]), np.array([[True, False]])).tolist() == [[0.0, 0.0]]
