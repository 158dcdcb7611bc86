"""Advantages against baselines other than a group's mean, and with weights between groups.

One number per trajectory, as in `group_baselines`; groups with equal rewards and groups of one get
exact zeros here too.
"""

import numpy as np
from numpy.typing import NDArray

from vla_rl.algorithms.advantages.group_baselines import by_group, group_advantage
from vla_rl.algorithms.advantages.returns import discounted_returns
from vla_rl.algorithms.advantages.reward_batch import Advantages, RewardBatch, outcome_advantages


def opo(batch: RewardBatch) -> Advantages:
    """OPO: the baseline of least variance if gradients grow with the length.

    Hao et al. 2025, arXiv:2505.23585.

        A_i = r_i - sum_j len_j r_j / sum_j len_j        over the members j of i's group

    Needs `group` and `num_tokens`. Raises: ValueError for a length that is not above 0.
    """
    lengths = batch.need("num_tokens", "opo")
    bad = np.flatnonzero(lengths <= 0.0)
    if len(bad):
        raise ValueError(
            f"num_tokens of {batch.name_of(int(bad[0]))} is {lengths[bad[0]]}, expected above 0."
        )
    outcome = np.zeros(len(batch))
    for rows in batch.groups("opo"):
        rewards = batch.rewards[rows]
        if len(rows) > 1 and np.ptp(rewards) > 0.0:
            outcome[rows] = rewards - np.average(rewards, weights=lengths[rows])
    return outcome_advantages(batch, outcome)


def remax(batch: RewardBatch) -> Advantages:
    """ReMax: the greedy policy's outcome from the same start is the baseline.

    Li et al. 2023, arXiv:2310.10505.

        A_t = sum of rewards from t on - r_greedy;       A = r - r_greedy if only an outcome is known

    Needs `greedy_rewards`, and no group.
    """
    greedy = batch.need("greedy_rewards", "remax")
    if batch.step_rewards is None:
        return outcome_advantages(batch, batch.rewards - greedy)
    mask, rewards = batch.need_mask("remax"), batch.rewards_by_step("remax")
    to_go = discounted_returns(rewards, mask, np.ones_like(rewards))
    return Advantages(np.where(mask, to_go - greedy[:, None], 0.0).astype(np.float32), mask=mask)


def gpg(batch: RewardBatch) -> Advantages:
    """GPG: compensate for the trajectories that teach nothing (Chu et al. 2025, arXiv:2504.02546).

        A_i = (r_i - mean(group)) * N / number of trajectories whose group is not all equal

    verl divides N by the number of trajectories with a reward other than 0 instead: in a group of
    successes and failures it counts only the successes, and it counts groups that are all solved.
    Needs `group`.
    """
    teaching = sum(len(rows) for rows in _teaching_groups(batch, "gpg"))
    weight = len(batch) / teaching if teaching else 0.0
    return _weighted_mean_baseline(batch, weight, "gpg")


def cpgd_filter(batch: RewardBatch, *, max_weight: float = 3.0) -> Advantages:
    """CPGD's weight that filters groups (Liu et al. 2025, arXiv:2505.12504).

        A_i = (r_i - mean(group)) * min(number of groups / number of groups that are not all equal, max_weight)

    Its other two weightings are `grpo` (by the standard deviation) and `dr_grpo` (none). siiRL
    counts trajectories above the line and groups below it, so that its factor nearly always is the
    maximum. Needs `group`.
    """
    groups = batch.groups("cpgd_filter")
    teaching = len(_teaching_groups(batch, "cpgd_filter"))
    weight = min(len(groups) / teaching, max_weight) if teaching else 0.0
    return _weighted_mean_baseline(batch, weight, "cpgd_filter")


def _weighted_mean_baseline(batch: RewardBatch, weight: float, needed_by: str) -> Advantages:
    scale = np.float32(weight)
    return by_group(
        batch, lambda rewards: scale * group_advantage(rewards, normalise_std=False), needed_by
    )


def _teaching_groups(batch: RewardBatch, needed_by: str) -> list[NDArray[np.intp]]:
    return [
        rows
        for rows in batch.groups(needed_by)
        if len(rows) > 1 and np.ptp(batch.rewards[rows]) > 0.0
    ]
