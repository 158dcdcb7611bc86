"""Returns without a critic, and advantages computed from them."""

import numpy as np
from numpy.typing import NDArray

from vla_rl.algorithms.advantages.group_baselines import by_group, group_advantage
from vla_rl.algorithms.advantages.reward_batch import Advantages, RewardBatch
from vla_rl.algorithms.advantages.whitening import whiten


def discounted_returns(
    rewards: NDArray[np.float64], mask: NDArray[np.bool_], discounts: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Compute R_t = r_t + discount_t * R_(next step that acted).

    Steps that did not act are skipped: they neither reset the return, as in other systems, nor
    discount it.

    Args:
        rewards: float64 [N, S], 0 where masked.
        mask: bool [N, S].
        discounts: float64 [N, S], from each step to the next that acted.

    Returns: float64 [N, S], 0 where masked.
    """
    returns = np.zeros(mask.shape)
    following = np.zeros(len(mask))
    for step in reversed(range(mask.shape[1])):
        acted = mask[:, step]
        following = np.where(acted, rewards[:, step] + discounts[:, step] * following, following)
        returns[:, step] = np.where(acted, following, 0.0)
    return returns


def step_discounts(batch: RewardBatch, gamma: float) -> NDArray[np.float64]:
    """Return the discounts, float64 [N, S]: gamma ** durations, or gamma for every step."""
    durations = (
        np.ones(batch.need_mask("a discounted return").shape)
        if batch.durations is None
        else batch.durations
    )
    return np.asarray(np.power(gamma, durations), dtype=np.float64)


def reinforce_plus_plus(batch: RewardBatch, *, gamma: float = 1.0) -> Advantages:
    """REINFORCE++: returns whitened over the whole batch instead of a group.

    Hu et al. 2025, arXiv:2501.03262.

        A = whiten(R),   R_t = r_t + gamma * R_(t+1)

    Needs `mask`. A time limit counts as a normal end: without a critic there is no value to
    bootstrap from.
    """
    mask = batch.need_mask("reinforce_plus_plus")
    returns = discounted_returns(
        batch.rewards_by_step("reinforce_plus_plus"), mask, step_discounts(batch, gamma)
    )
    return Advantages(whiten(returns, mask).astype(np.float32), returns.astype(np.float32), mask)


def reinforce_plus_plus_baseline(batch: RewardBatch) -> Advantages:
    """REINFORCE++ with a baseline: centred within the group, scaled over the batch.

    Hu et al. 2025, arXiv:2501.03262.

        A = whiten(r_i - mean(group)), over all steps if there is a mask, else over trajectories

    Needs `group`.
    """
    centred = by_group(
        batch,
        lambda rewards: group_advantage(rewards, normalise_std=False),
        "reinforce_plus_plus_baseline",
    )
    mask = np.ones((len(batch), 1), dtype=np.bool_) if batch.mask is None else batch.mask
    whitened = whiten(centred.advantage.astype(np.float64), mask)
    return Advantages(whitened.astype(np.float32), mask=batch.mask)
