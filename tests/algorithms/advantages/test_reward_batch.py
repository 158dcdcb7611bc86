"""Batches of rewards that do not fit, or hold a number that is not finite, are refused by name."""

import numpy as np
import pytest

from vla_rl.algorithms import RewardBatch


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
