"""Which episodes of an update are learnt from; the others were only there to be compared with.

    greedy       what ReMax's baseline was measured with: the policy chose nothing by its own distribution
    cut off      by a time limit, where `filter.mask_truncated` says so: DAPO's overlong filtering

Both count in their groups' baselines: this happens after the advantages are made.
"""

from collections.abc import Sequence

import numpy as np

from vla_rl.algorithms.filters import overlong_filter
from vla_rl.engines.rows import Advantage
from vla_rl.types import Trajectory


def learnt_from(
    trajectories: Sequence[Trajectory], advantages: Sequence[Advantage], *, mask_truncated: bool
) -> tuple[list[int], list[Advantage]]:
    """Positions of the episodes to learn from, and their advantages; maybe of none.

    Args:
        trajectories: of the update.
        advantages: one for each.
        mask_truncated: leave out those that a time limit cut off.
    """
    is_learnt = np.array([not trajectory.episode.sampling.greedy for trajectory in trajectories])
    if mask_truncated:
        is_cut_off = np.array([trajectory.stop_reason.is_cut_off for trajectory in trajectories])
        is_learnt = overlong_filter(is_learnt[:, None], is_cut_off)[:, 0]
    kept = np.flatnonzero(is_learnt).tolist()
    return kept, [advantages[row] for row in kept]
