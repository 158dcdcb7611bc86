"""Check estimators whose baseline is no mean of a group against numbers worked out by hand."""

import numpy as np
import pytest
from reward_batches import column, estimate, outcomes

from vla_rl.algorithms import RewardBatch


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
