"""Check discounted returns and the estimators that whiten them against numbers worked out by hand."""

import numpy as np
from reward_batches import column, estimate, outcomes

from vla_rl.algorithms import RewardBatch


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
