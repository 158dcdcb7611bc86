"""Selection of the episodes of an update to learn from.

Two kinds are left out and only count in their groups' baselines:

    greedy       ReMax's baseline episode, in which the policy did not sample its actions
    truncated    by a limit and unsolved, if `filter.mask_truncated` is set: DAPO's overlong filtering

The selection happens after the advantages are computed.
"""

from collections.abc import Sequence

import numpy as np

from vla_rl.algorithms.filters import overlong_filter
from vla_rl.learner.rows import Advantage
from vla_rl.types import Trajectory


def is_cut_short(trajectory: Trajectory) -> bool:
    """Return whether a limit ended the episode unsolved, so that its full return is unknown."""
    return trajectory.stop_reason.is_cut_off and not trajectory.is_success


def select_episodes(
    trajectories: Sequence[Trajectory], advantages: Sequence[Advantage], *, mask_truncated: bool
) -> tuple[list[int], list[Advantage]]:
    """Return the positions of the episodes to learn from, and their advantages; both may be empty.

    Args:
        trajectories: episodes of the update.
        advantages: one for each episode.
        mask_truncated: leave out episodes that a limit truncated unsolved.
    """
    is_learnt = np.array([not trajectory.episode.sampling.greedy for trajectory in trajectories])
    if mask_truncated:
        is_short = np.array([is_cut_short(trajectory) for trajectory in trajectories])
        is_learnt = overlong_filter(is_learnt[:, None], is_short)[:, 0]
    kept = np.flatnonzero(is_learnt).tolist()
    return kept, [advantages[row] for row in kept]
