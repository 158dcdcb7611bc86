"""Which episodes of an update are learnt from; the others were only there to be compared with.

    greedy       what ReMax's baseline was measured with: the policy chose nothing by its own distribution
    cut off      unsolved by a limit, where `filter.mask_truncated` says so: DAPO's overlong filtering

Both count in their groups' baselines: this happens after the advantages are made.
"""

from collections.abc import Sequence

import numpy as np

from vla_rl.algorithms.filters import overlong_filter
from vla_rl.learning.rows import Advantage
from vla_rl.types import Trajectory


def is_cut_short(trajectory: Trajectory) -> bool:
    """Whether a limit ended the episode unsolved, so that nobody knows what it would have been worth."""
    return trajectory.stop_reason.is_cut_off and not trajectory.is_success


def learnt_from(
    trajectories: Sequence[Trajectory], advantages: Sequence[Advantage], *, mask_truncated: bool
) -> tuple[list[int], list[Advantage]]:
    """Positions of the episodes to learn from, and their advantages; maybe of none.

    Args:
        trajectories: of the update.
        advantages: one for each.
        mask_truncated: leave out those that a limit cut off unsolved.
    """
    is_learnt = np.array([not trajectory.episode.sampling.greedy for trajectory in trajectories])
    if mask_truncated:
        is_short = np.array([is_cut_short(trajectory) for trajectory in trajectories])
        is_learnt = overlong_filter(is_learnt[:, None], is_short)[:, 0]
    kept = np.flatnonzero(is_learnt).tolist()
    return kept, [advantages[row] for row in kept]
