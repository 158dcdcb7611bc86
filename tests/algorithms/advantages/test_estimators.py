"""What holds for every advantage estimator that a configuration names; advantages against baselines by hand."""

import inspect

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from small_batches import OF_GROUPS, column, estimate, outcomes

from vla_rl.algorithms import (
    AdvantageConfig,
    Advantages,
    RewardBatch,
    group_advantage,
    leave_one_out_advantage,
)
from vla_rl.algorithms.advantages import (
    ADVANTAGE_PARAMETERS,
    ADVANTAGES,
    outcome_advantages,
)
from vla_rl.errors import ConfigError


def twice_the_reward(batch: RewardBatch, *, gamma: float = 2.0) -> Advantages:
    """An estimator of somebody's own."""
    return outcome_advantages(batch, gamma * batch.rewards)


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
def test_the_parameters_of_an_estimator_are_its_keyword_arguments(name) -> None:
    arguments = inspect.signature(ADVANTAGES[name]).parameters
    defaults = {key: value.default for key, value in arguments.items() if key != "batch"}
    assert defaults == ADVANTAGE_PARAMETERS[name]


@pytest.mark.parametrize("name", OF_GROUPS)
def test_groups_that_are_all_equal_and_groups_of_one_give_no_signal(name) -> None:
    made = estimate(name, outcomes([0.1, 0.1, 0.1, 5.0], [0, 0, 0, 1]))
    assert column(made) == [0.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("name", [*OF_GROUPS, "remax"])
def test_an_empty_batch_has_no_advantages(name) -> None:
    assert estimate(name, outcomes([], [])).per_trajectory() == []


@pytest.mark.parametrize("name", OF_GROUPS)
def test_an_outcome_is_spread_over_the_steps_that_acted(name) -> None:
    mask = np.array([[True, False, True], [True, True, False]])
    batch = outcomes([1.0, 0.0], [0, 0], mask=mask)
    made = estimate(name, batch)
    assert made.advantage.shape == (2, 3)
    assert not made.advantage[~mask].any()
    assert made.advantage[0, 0] == made.advantage[0, 2] > 0
    assert [len(row) for row in made.per_trajectory()] == [3, 2]


@settings(max_examples=40)
@given(
    rewards=st.lists(st.integers(0, 4).map(float), min_size=2, max_size=10),
    shift=st.sampled_from([-3.0, 1.0, 8.0]),
    data=st.data(),
)
def test_a_shift_of_all_rewards_is_not_seen_and_rows_may_stand_in_any_order(
    rewards, shift, data
) -> None:
    group = data.draw(st.lists(st.integers(0, 2), min_size=len(rewards), max_size=len(rewards)))
    order = data.draw(st.permutations(range(len(rewards))))
    for name in OF_GROUPS:
        made = column(estimate(name, outcomes(rewards, group)))
        if name != "max_rl":
            moved = outcomes([reward + shift for reward in rewards], group)
            np.testing.assert_allclose(column(estimate(name, moved)), made, atol=1e-5)
        if name != "pass_at_k":  # of equally good members the first is the best
            shuffled = estimate(
                name, outcomes([rewards[i] for i in order], [group[i] for i in order])
            )
            np.testing.assert_allclose(column(shuffled), np.array(made)[list(order)], atol=1e-5)


@settings(max_examples=40)
@given(
    st.lists(st.integers(0, 4).map(float), min_size=2, max_size=8), st.sampled_from([0.5, 2.0, 4.0])
)
def test_what_divides_by_a_spread_does_not_see_the_scale_and_what_does_not_is_scaled(
    rewards, scale
) -> None:
    group = [0] * len(rewards)
    for name, factor in {
        "grpo": 1.0,
        "max_rl": 1.0,
        "pass_at_k": 1.0,
        "dr_grpo": scale,
        "rloo": scale,
        "gpg": scale,
    }.items():
        made = np.array(column(estimate(name, outcomes(rewards, group))))
        scaled = column(estimate(name, outcomes([scale * reward for reward in rewards], group)))
        np.testing.assert_allclose(scaled, factor * made, rtol=1e-4, atol=1e-5)


def test_an_estimator_of_ones_own_is_named_by_module_and_function() -> None:
    own = f"{__name__}:twice_the_reward"
    assert column(estimate(own, outcomes([3.0], [0]))) == [6.0]
    assert column(estimate(own, outcomes([3.0], [0]), gamma=0.5)) == [1.5]
    with pytest.raises(ConfigError, match="has no keyword argument 'lam'"):
        estimate(own, outcomes([3.0], [0]), lam=0.9)
    with pytest.raises(ConfigError, match="did you mean 'twice_the_reward'"):
        estimate(f"{__name__}:twice_the_rewards", outcomes([3.0], [0]))


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("grpo", "group"),
        ("remax", "greedy_rewards"),
        ("opo", "num_tokens"),
        ("reinforce_plus_plus", "mask"),
        ("gae", "mask"),
        ("marft_gae", "agents"),
    ],
)
def test_an_estimator_says_which_field_it_misses(name, missing) -> None:
    with pytest.raises(
        ValueError, match=rf"the advantage '{name}' needs RewardBatch.{missing}, but it is None"
    ):
        estimate(name, RewardBatch(rewards=np.zeros(2)))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": "gropo"}, r"AdvantageConfig.name 'gropo' is unknown; did you mean 'grpo'\?"),
        ({"name": "grpo", "lam": 0.9}, "advantage 'grpo' has no lam; it has: no parameters"),
    ],
)
def test_a_config_that_means_nothing_is_refused(fields, message) -> None:
    with pytest.raises(ConfigError, match=message):
        AdvantageConfig(**fields)


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
def test_whether_an_estimator_needs_groups_or_values_is_known_from_its_config(name) -> None:
    config = AdvantageConfig(name=name)
    assert config.needs_group == (name in (*OF_GROUPS, "hierarchical_rloo"))
    assert config.needs_values == (name in ("gae", "marft_gae"))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_number_that_is_not_finite_is_refused_with_the_episode(bad) -> None:
    ids, mask = np.array([11, 12]), np.array([[True, True], [True, False]])
    with pytest.raises(
        ValueError, match=rf"rewards of episode 12 is {bad}, expected a finite number"
    ):
        RewardBatch(rewards=np.array([0.0, bad]), episode_ids=ids)
    with pytest.raises(ValueError, match=rf"step_rewards of episode 11 at step 1 is {bad}"):
        RewardBatch(
            rewards=np.zeros(2),
            episode_ids=ids,
            mask=mask,
            step_rewards=np.array([[0.0, bad], [0.0, 0.0]]),
        )
    with pytest.raises(ValueError, match=rf"values of trajectory 0 at step 0 is {bad}"):
        RewardBatch(rewards=np.zeros(2), mask=mask, values=np.array([[bad, 0.0], [0.0, 0.0]]))
    with pytest.raises(ValueError, match=rf"final_values of trajectory 1 is {bad}"):
        RewardBatch(rewards=np.zeros(2), final_values=np.array([0.0, bad]))
    # padding may hold anything
    RewardBatch(rewards=np.zeros(2), mask=mask, values=np.array([[0.0, 0.0], [0.0, bad]]))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rewards": np.zeros((2, 1))}, r"rewards are \[2, 1\], expected \[N\]"),
        ({"group": np.zeros(3, int)}, r"group is \[3\], expected \[2\]"),
        ({"mask": np.ones((2, 3))}, r"mask is float64 \[2, 3\], expected bool \[2, S\]"),
        ({"step_rewards": np.zeros((2, 3))}, "step_rewards are given without a mask"),
        ({"values": np.zeros((2, 3))}, "values is given without a mask"),
        (
            {"mask": np.ones((2, 3), bool), "values": np.zeros((2, 2))},
            r"values is \[2, 2\], expected \[2, 3\]",
        ),
        (
            {"mask": np.zeros((2, 1), bool), "step_rewards": np.ones((2, 1))},
            "step_rewards of trajectory 0 at step 0 is 1.0 where the policy did not act",
        ),
    ],
)
def test_a_batch_that_does_not_fit_is_refused_by_name(fields, message) -> None:
    with pytest.raises(ValueError, match=message):
        RewardBatch(**({"rewards": np.zeros(2)} | fields))


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
def test_a_group_of_one_or_of_equal_rewards_gives_no_signal(advantage, rewards) -> None:
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


def test_gpg_makes_up_for_trajectories_that_give_no_signal() -> None:
    # 2 of 6 trajectories teach: weight 3
    made = estimate("gpg", outcomes([1.0, 0.0, 1.0, 1.0, 0.0, 0.0], [0, 0, 1, 1, 2, 2]))
    assert column(made) == [1.5, -1.5, 0.0, 0.0, 0.0, 0.0]


def test_cpgd_weighs_by_the_share_of_groups_with_signal_up_to_a_maximum() -> None:
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
