"""Our rule: the share of its nearest success that a failure retraced, in order.

    reference  r_1 ── r_2 ── r_3 ── r_4 ── r_5        5 moments of a success
                │      │      │      :      :
    failure    f_1 ── f_2 ── f_3 ── f_3 ── f_3        followed it to r_3: a little over 3/5

The paper compares whole trajectories by one vector each, so a failure that stops early is far from
every success in most of its frames, wherever it stopped. This rule aligns time first. The study in
`docs/srpo.md` compares the rules.
"""

import numpy as np
from numpy.typing import NDArray

from vla_rl.algorithms.srpo.clusters import in_canonical_order, pairwise_distances
from vla_rl.algorithms.srpo.config import SrpoConfig


def aligned_rewards(
    references: NDArray[np.float64], failures: NDArray[np.float64], config: SrpoConfig
) -> NDArray[np.float64]:
    """Compute rewards of the failures of one task by our own rule.

    It is not the paper's (arXiv:2511.15605).

        p_i = max over references r and t_1 <= t_2 <= .. <= t_K of
              mean over k of exp(-|f_i(t_k) - r(k)|^2 / (2 width^2))
        r_i = alpha * p_i

    Every moment k of a reference is matched with one moment of the failure, in the order of time; a
    failure may stand still, be slower or do other things in between. Every success is a reference
    of its own, so every way to succeed is. width comes from the data (`usual_step`), so the unit of
    the embedding cancels. p is a share of the task: unlike the paper's z-score it does not depend
    on the other failures, and means the same across groups, tasks and updates.

    Args:
        references: float64 [S, T, D], S >= 1, successes.
        failures: float64 [F, T, D], F >= 1.
        config: alpha.

    Returns: float64 [F] in [0, alpha].
    """
    # fixed order of the references, one failure at a time: rounding does not depend on the rest of
    # the batch
    shape = references.shape
    references = in_canonical_order(references.reshape(len(references), -1)).reshape(shape)
    width = usual_step(references, failures)
    middle = references.mean(axis=(0, 1))
    centred = references - middle
    return config.alpha * np.array(
        [_retraced(centred, failure - middle, width) for failure in failures]
    )


def usual_step(references: NDArray[np.float64], failures: NDArray[np.float64]) -> float:
    """Return the median distance that a success moves from one moment to the next.

    Moments where it stands still do not count.

    If no success moves (T = 1): the median distance between different successes, else from failures
    to successes. If these are 0 too, all points are equal and any width works: 1.
    """
    steps = np.linalg.norm(np.diff(references, axis=1), axis=2).ravel()
    whole, failed = references.reshape(len(references), -1), failures.reshape(len(failures), -1)
    for distances in (steps, pairwise_distances(whole, whole), pairwise_distances(failed, whole)):
        positive = distances[distances > 0.0]
        if len(positive):
            return float(np.median(positive))
    return 1.0


def _retraced(references: NDArray[np.float64], failure: NDArray[np.float64], width: float) -> float:
    """Compute p of one failure [T, D] over references [S, K, D]."""
    num_moments = references.shape[1]
    squared = (
        (references**2).sum(axis=2)[..., None]
        - 2.0 * references @ failure.T
        + (failure**2).sum(axis=1)
    )
    closeness = np.exp(squared.clip(min=0.0) / (-2.0 * width**2))  # [S, K, T]
    # best[s, t]: the best sum so far that ends at moment t or before
    best = np.zeros((len(references), failure.shape[0]))
    for moment in range(num_moments):
        best = np.maximum.accumulate(best + closeness[:, moment], axis=1)
    return float(best[:, -1].max() / num_moments)
