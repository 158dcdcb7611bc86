"""Advantages against baselines: numbers by hand, and what no reward may change."""

import numpy as np
import pytest
from hypothesis import given, strategies as st
from reward_batches import column, estimate, outcomes

from vla_rl.algorithms import (
    RewardBatch,
    group_advantage,
    leave_one_out_advantage,
)

REWARDS = st.lists(st.floats(-100.0, 100.0, width=32), min_size=2, max_size=16)


def test_grpo_divides_by_the_unbiased_std_of_the_group() -> None:
    # mean 3/8; variance (3 * 0.625^2 + 5 * 0.375^2) / 7 = 1.875 / 7; std 0.5175492
    expected = [0.625 / 0.5175502] * 3 + [-0.375 / 0.5175502] * 5
    np.testing.assert_allclose(group_advantage([1, 1, 1, 0, 0, 0, 0, 0]), expected, rtol=1e-6)


def test_dr_grpo_only_subtracts_the_mean() -> None:
    np.testing.assert_allclose(
        group_advantage([2.0, 0.0, 1.0], normalise_std=False), [1.0, -1.0, 0.0], atol=1e-7
    )


def test_rloo_compares_each_member_with_the_mean_of_the_others() -> None:
    # 4 - (1 + 1) / 2, 1 - (4 + 1) / 2, the same
    np.testing.assert_allclose(
        leave_one_out_advantage([4.0, 1.0, 1.0]), [3.0, -1.5, -1.5], rtol=1e-6
    )


@pytest.mark.parametrize("advantage", [group_advantage, leave_one_out_advantage])
@pytest.mark.parametrize("rewards", [[], [5.0], [0.1, 0.1, 0.1], [0.0] * 8])
def test_a_group_of_one_or_of_equal_rewards_teaches_nothing(advantage, rewards) -> None:
    result = advantage(rewards)
    assert result.tolist() == [0.0] * len(rewards)
    assert result.dtype == np.float32


@pytest.mark.parametrize("advantage", [group_advantage, leave_one_out_advantage])
def test_a_reward_that_is_not_finite_is_refused_with_its_member(advantage) -> None:
    with pytest.raises(ValueError, match="member 2 is nan"):
        advantage([0.0, 1.0, float("nan")])


def test_several_groups_at_once_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\(2, 2\), expected \[G\]"):
        group_advantage(np.zeros((2, 2)))


@given(REWARDS)
def test_advantages_sum_to_zero_and_keep_the_order_of_the_rewards(rewards) -> None:
    for result in (
        group_advantage(rewards),
        group_advantage(rewards, normalise_std=False),
        leave_one_out_advantage(rewards),
    ):
        assert abs(float(result.sum())) <= 1e-4 * max(1.0, float(np.abs(result).max()))
        assert (np.diff(result[np.argsort(rewards, kind="stable")]) >= -1e-4).all()


@given(REWARDS, st.floats(-50.0, 50.0), st.floats(0.5, 4.0))
def test_grpo_does_not_see_shift_and_scale_of_rewards(rewards, shift, scale) -> None:
    if np.ptp(rewards) < 1.0:
        return  # there the epsilon beside the std is not small
    moved = [scale * reward + shift for reward in rewards]
    np.testing.assert_allclose(group_advantage(moved), group_advantage(rewards), atol=1e-4)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # groups [4, 1, 1] (mean 2, std sqrt 3) and [0, 1] (mean 0.5, std sqrt 0.5), members mixed
        # in the batch
        ("grpo", [2 / 3**0.5, -0.5 / 0.5**0.5, -1 / 3**0.5, 0.5 / 0.5**0.5, -1 / 3**0.5]),
        ("dr_grpo", [2.0, -0.5, -1.0, 0.5, -1.0]),
        ("rloo", [3.0, -1.0, -1.5, 1.0, -1.5]),
        ("max_rl", [1.0, -1.0, -0.5, 1.0, -0.5]),
        ("pass_at_k", [3.0 / 3**0.5, 0.0, 0.0, 1.0 / 0.5**0.5, 0.0]),
    ],
)
def test_each_group_is_its_own_baseline_wherever_its_members_stand(name, expected) -> None:
    made = estimate(name, outcomes([4.0, 0.0, 1.0, 1.0, 1.0], [7, 2, 7, 2, 7]))
    np.testing.assert_allclose(column(made), expected, rtol=1e-5)


def test_pass_at_k_without_the_standard_deviation_is_the_gain_over_the_second_best() -> None:
    assert column(
        estimate("pass_at_k", outcomes([4.0, 1.0, 1.5], [0, 0, 0]), normalise_std=False)
    ) == [2.5, 0.0, 0.0]
    assert column(estimate("pass_at_k", outcomes([4.0, 4.0, 1.0], [0, 0, 0]))) == [0.0, 0.0, 0.0]


def test_max_rl_refuses_negative_rewards() -> None:
    with pytest.raises(
        ValueError, match=r"max_rl was given the reward -1.0, expected rewards >= 0"
    ):
        estimate("max_rl", outcomes([-1.0, 1.0], [0, 0]))


def test_gpg_makes_up_for_trajectories_that_teach_nothing() -> None:
    # 2 of 6 trajectories teach: weight 3
    made = estimate("gpg", outcomes([1.0, 0.0, 1.0, 1.0, 0.0, 0.0], [0, 0, 1, 1, 2, 2]))
    assert column(made) == [1.5, -1.5, 0.0, 0.0, 0.0, 0.0]


def test_cpgd_weighs_by_the_share_of_groups_that_teach_up_to_a_maximum() -> None:
    two_of_three = outcomes([1.0, 0.0, 1.0, 1.0, 0.0, 1.0], [0, 0, 1, 1, 2, 2])
    np.testing.assert_allclose(
        column(estimate("cpgd_filter", two_of_three)), [0.75, -0.75, 0.0, 0.0, -0.75, 0.75]
    )
    one_of_five = outcomes([1.0, 0.0, *[1.0] * 8], [0, 0, 1, 1, 2, 2, 3, 3, 4, 4])
    assert column(estimate("cpgd_filter", one_of_five))[:2] == [1.5, -1.5]  # 5 is held at 3
    assert column(estimate("cpgd_filter", one_of_five, max_weight=4.0))[:2] == [2.0, -2.0]


def test_opo_weighs_the_baseline_by_length() -> None:
    # (3 * 1 + 1 * 0) / 4 = 0.75
    made = estimate("opo", outcomes([1.0, 0.0], [0, 0], num_tokens=np.array([3.0, 1.0])))
    assert column(made) == [0.25, -0.75]
    with pytest.raises(ValueError, match=r"num_tokens of episode 9 is 0.0, expected above 0"):
        estimate(
            "opo",
            outcomes(
                [1.0, 0.0], [0, 0], num_tokens=np.array([1.0, 0.0]), episode_ids=np.array([8, 9])
            ),
        )


def test_remax_subtracts_the_greedy_outcome() -> None:
    assert column(
        estimate("remax", outcomes([1.0, 0.0], [0, 1], greedy_rewards=np.array([0.25, 0.5])))
    ) == [0.75, -0.5]
    by_step = RewardBatch(
        rewards=np.array([3.0]),
        greedy_rewards=np.array([1.0]),
        mask=np.array([[True, True, False]]),
        step_rewards=np.array([[1.0, 2.0, 0.0]]),
    )
    assert estimate("remax", by_step).advantage.tolist() == [[2.0, 1.0, 0.0]]
