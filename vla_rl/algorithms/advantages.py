"""How much better a trajectory was than its group: one number a trajectory, before any gradient.

Called by the advantage node with the rewards of one group at a time. Every function takes rewards [G], returns float32
[G], and refuses a reward that is not finite. Rewards that are all equal give exact zeros: such a group teaches nothing.
"""

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Rewards: TypeAlias = Sequence[float] | NDArray[np.floating]

STD_EPSILON = 1e-6
"""Added to the standard deviation of a group before dividing by it."""


def group_advantage(rewards: Rewards, normalise_std: bool = True) -> NDArray[np.float32]:
    """GRPO's outcome advantage (Shao et al. 2024, arXiv:2402.03300, section 4.1.2); without the std, Dr. GRPO's.

        A_i = (r_i - mean(r)) / (std(r) + 1e-6)      normalise_std=True
        A_i =  r_i - mean(r)                         normalise_std=False (Liu et al. 2025, arXiv:2503.20783)

    Args:
        rewards: [G], the outcome of each member of one group.
        normalise_std: divide by the group's standard deviation; it is the unbiased one (n - 1).

    Returns: float32 [G]. A group of one has no one to be compared with and gets 0; other systems hand it its raw
    reward. Raises: ValueError for a reward that is not finite.
    """
    values = _checked(rewards)
    if len(values) < 2 or np.ptp(values) == 0.0:
        return np.zeros(len(values), dtype=np.float32)
    centred = values - values.mean()
    if normalise_std:
        centred = centred / (values.std(ddof=1) + STD_EPSILON)
    return np.asarray(centred, dtype=np.float32)


def leave_one_out_advantage(rewards: Rewards) -> NDArray[np.float32]:
    """RLOO's advantage (Ahmadian et al. 2024, arXiv:2402.14740): the others of the group are the baseline.

        A_i = r_i - mean of the other G - 1 rewards = (r_i - mean(r)) * G / (G - 1)

    Args:
        rewards: [G], the outcome of each member of one group.

    Returns: float32 [G]; a group of one gets 0. Raises: ValueError for a reward that is not finite.
    """
    values = _checked(rewards)
    size = len(values)
    if size < 2 or np.ptp(values) == 0.0:
        return np.zeros(size, dtype=np.float32)
    return np.asarray((values - values.mean()) * (size / (size - 1)), dtype=np.float32)


def _checked(rewards: Rewards) -> NDArray[np.float64]:
    values = np.asarray(rewards, dtype=np.float64)
    if values.ndim != 1:
        raise ValueError(
            f"rewards have shape {values.shape}, expected [G]: one number a member; pass one group at a time."
        )
    bad = np.flatnonzero(~np.isfinite(values))
    if len(bad):
        raise ValueError(
            f"reward of member {bad[0]} is {values[bad[0]]}, expected a finite number; check the reward node."
        )
    return values
