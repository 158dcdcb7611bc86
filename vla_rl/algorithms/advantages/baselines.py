"""Advantages against a baseline of the group: one number per trajectory.

A group whose rewards are all equal, or a group of one, gets exact zeros: it has no signal. (Other
systems give a lone trajectory its raw reward.)
"""

from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from vla_rl.algorithms.advantages.reward_batch import Advantages, RewardBatch, outcome_advantages

Rewards: TypeAlias = Sequence[float] | NDArray[np.floating]

STD_EPSILON: Final = 1e-6
"""Added to the standard deviation of a group before dividing by it."""


def group_advantage(rewards: Rewards, normalise_std: bool = True) -> NDArray[np.float32]:
    """Compute GRPO's outcome advantage; without the std, Dr. GRPO's.

    Shao et al. 2024, arXiv:2402.03300, section 4.1.2.

        A_i = (r_i - mean(r)) / (std(r) + 1e-6)      normalise_std=True
        A_i =  r_i - mean(r)                         normalise_std=False (Liu et al. 2025, arXiv:2503.20783)

    Args:
        rewards: [G], the outcome of each member of one group.
        normalise_std: divide by the group's unbiased standard deviation (n - 1).

    Returns: float32 [G]. Raises: ValueError for a reward that is not finite.
    """
    values = _checked(rewards)
    if _has_no_signal(values):
        return np.zeros(len(values), dtype=np.float32)
    centred = values - values.mean()
    if normalise_std:
        # n - 1 and not n: verl and siiRL divide so, and golden tests hold their numbers
        centred = centred / (values.std(ddof=1) + STD_EPSILON)
    return np.asarray(centred, dtype=np.float32)


def leave_one_out_advantage(rewards: Rewards) -> NDArray[np.float32]:
    """Compute RLOO's advantage, with the others of the group as the baseline.

    Ahmadian et al. 2024, arXiv:2402.14740.

        A_i = r_i - mean of the other G - 1 rewards = (r_i - mean(r)) * G / (G - 1)

    Args:
        rewards: [G], the outcome of each member of one group.

    Returns: float32 [G]. Raises: ValueError for a reward that is not finite.
    """
    values = _checked(rewards)
    size = len(values)
    if _has_no_signal(values):
        return np.zeros(size, dtype=np.float32)
    # the mean of the others, written with the mean of all, so that the advantages of a group add up
    # to 0
    return np.asarray((values - values.mean()) * (size / (size - 1)), dtype=np.float32)


def max_likelihood_advantage(rewards: Rewards) -> NDArray[np.float32]:
    """Compute MaxRL's advantage for rewards of 0 and 1 (arXiv:2602.02710).

    Hard groups weigh as much as in maximum likelihood.

        A_i = (r_i - mean(r)) / mean(r)              0 if the mean is not above 0

    Same as prime-rl's `max_rl`. Rewards must not be negative.

    Args:
        rewards: [G], each >= 0.

    Returns: float32 [G]. Raises: ValueError for a negative reward or one that is not finite.
    """
    values = _checked(rewards)
    # with negative rewards the mean may be near 0 or below it: the quotient would explode, or turn
    # round which members are good
    if len(values) and values.min() < 0.0:
        raise ValueError(
            f"max_rl was given the reward {values.min()}, expected rewards >= 0; use "
            "'dr_grpo' instead."
        )
    if _has_no_signal(values):
        return np.zeros(len(values), dtype=np.float32)
    return np.asarray((values - values.mean()) / values.mean(), dtype=np.float32)


def best_of_group_advantage(rewards: Rewards, normalise_std: bool = True) -> NDArray[np.float32]:
    """Compute pass@k's advantage: only the best member of a group gets one.

    Tang et al. 2025, arXiv:2503.19595.

        A_best = (r_best - r_second) / (std(r) + 1e-6),  A of all others = 0

    If the two best members are equal, all advantages are 0. `normalise_std=False` leaves the
    division out.

    Args:
        rewards: [G], the outcome of each member of one group.

    Returns: float32 [G]. Raises: ValueError for a reward that is not finite.
    """
    values = _checked(rewards)
    advantage = np.zeros(len(values), dtype=np.float32)
    if _has_no_signal(values):
        return advantage
    # of two equal best members neither is better than the other, so that no member gets an
    # advantage
    second, best = np.sort(values)[-2:]
    gain = best - second
    advantage[int(values.argmax())] = (
        gain / (values.std(ddof=1) + STD_EPSILON) if normalise_std else gain
    )
    return advantage


def grpo(batch: RewardBatch) -> Advantages:
    """Apply `group_advantage` to every group. Needs `group`."""
    return by_group(batch, group_advantage, "grpo")


def dr_grpo(batch: RewardBatch) -> Advantages:
    """Apply `group_advantage` without the standard deviation to every group. Needs `group`.

    It is also CPGD's unweighted advantage.

    Use it with the aggregation `seq_mean_token_sum_norm`.
    """
    return by_group(batch, lambda rewards: group_advantage(rewards, normalise_std=False), "dr_grpo")


def rloo(batch: RewardBatch) -> Advantages:
    """Apply `leave_one_out_advantage` to every group. Needs `group`."""
    return by_group(batch, leave_one_out_advantage, "rloo")


def max_rl(batch: RewardBatch) -> Advantages:
    """Apply `max_likelihood_advantage` to every group. Needs `group`."""
    return by_group(batch, max_likelihood_advantage, "max_rl")


def pass_at_k(batch: RewardBatch, *, normalise_std: bool = True) -> Advantages:
    """Apply `best_of_group_advantage` to every group. Needs `group`."""
    return by_group(
        batch, lambda rewards: best_of_group_advantage(rewards, normalise_std), "pass_at_k"
    )


def by_group(
    batch: RewardBatch, advantage: Callable[[Rewards], NDArray[np.float32]], needed_by: str
) -> Advantages:
    """Apply an advantage of one group's rewards, float [G] -> float32 [G], to every group."""
    # group by group and not as an array [groups, members]: a batch may have groups of different
    # sizes
    outcome = np.zeros(len(batch), dtype=np.float32)
    for rows in batch.groups(needed_by):
        outcome[rows] = advantage(batch.rewards[rows])
    return outcome_advantages(batch, outcome)


def _has_no_signal(values: NDArray[np.float64]) -> bool:
    # equal rewards are compared exactly: their mean may be off by one rounding, and dividing that by
    # a standard deviation of almost 0 would make an advantage of noise
    return len(values) < 2 or bool(np.ptp(values) == 0.0)


def _checked(rewards: Rewards) -> NDArray[np.float64]:
    values = np.asarray(rewards, dtype=np.float64)
    if values.ndim != 1:
        raise ValueError(
            f"rewards have shape {values.shape}, expected [G]: one number a member; pass one "
            "group at a time."
        )
    bad = np.flatnonzero(~np.isfinite(values))
    if len(bad):
        raise ValueError(
            f"reward of member {bad[0]} is {values[bad[0]]}, expected a finite number; check the "
            "reward node."
        )
    return values


def opo(batch: RewardBatch) -> Advantages:
    """OPO: the baseline of least variance if gradients grow with the length.

    Hao et al. 2025, arXiv:2505.23585.

        A_i = r_i - sum_j len_j r_j / sum_j len_j        over the members j of i's group

    Needs `group` and `num_tokens`. Raises: ValueError for a length that is not above 0.
    """
    lengths = batch.need("num_tokens", "opo")
    # a length of 0 would take its trajectory out of the baseline that its reward is compared with
    bad = np.flatnonzero(lengths <= 0.0)
    if len(bad):
        raise ValueError(
            f"num_tokens of {batch.describe_row(int(bad[0]))} is {lengths[bad[0]]}, expected above 0."
        )
    outcome = np.zeros(len(batch))
    for rows in batch.groups("opo"):
        rewards = batch.rewards[rows]
        if len(rows) > 1 and np.ptp(rewards) > 0.0:
            outcome[rows] = rewards - np.average(rewards, weights=lengths[rows])
    return outcome_advantages(batch, outcome)


def gpg(batch: RewardBatch) -> Advantages:
    """GPG: compensate for the trajectories without a signal (Chu et al. 2025, arXiv:2504.02546).

        A_i = (r_i - mean(group)) * N / number of trajectories whose group is not all equal

    verl divides N by the number of trajectories with a reward other than 0 instead: in a group of
    successes and failures it counts only the successes, and it counts groups that are all solved.
    Needs `group`.
    """
    num_with_signal = sum(len(rows) for rows in _groups_with_signal(batch, "gpg"))
    weight = len(batch) / num_with_signal if num_with_signal else 0.0
    return _weighted_mean_baseline(batch, weight, "gpg")


def cpgd_filter(batch: RewardBatch, *, max_weight: float = 3.0) -> Advantages:
    """CPGD's weight that filters groups (Liu et al. 2025, arXiv:2505.12504).

        A_i = (r_i - mean(group)) * min(number of groups / number of groups that are not all equal, max_weight)

    Its other two weightings are `grpo` (by the standard deviation) and `dr_grpo` (none). siiRL
    counts trajectories above the line and groups below it, so that its factor nearly always is the
    maximum. Needs `group`.
    """
    groups = batch.groups("cpgd_filter")
    num_with_signal = len(_groups_with_signal(batch, "cpgd_filter"))
    # groups over groups: siiRL has trajectories above the line, so that its factor is nearly always
    # the bound
    weight = min(len(groups) / num_with_signal, max_weight) if num_with_signal else 0.0
    return _weighted_mean_baseline(batch, weight, "cpgd_filter")


def _weighted_mean_baseline(batch: RewardBatch, weight: float, needed_by: str) -> Advantages:
    scale = np.float32(weight)
    return by_group(
        batch, lambda rewards: scale * group_advantage(rewards, normalise_std=False), needed_by
    )


def _groups_with_signal(batch: RewardBatch, needed_by: str) -> list[NDArray[np.intp]]:
    return [
        rows
        for rows in batch.groups(needed_by)
        if len(rows) > 1 and np.ptp(batch.rewards[rows]) > 0.0
    ]
