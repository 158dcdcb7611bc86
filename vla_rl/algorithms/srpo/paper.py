"""The paper's rule: the distance of a whole trajectory from the successes' clusters.

It is taken relative to the other failures.
"""

import numpy as np
from numpy.typing import NDArray

from vla_rl.algorithms.srpo.clusters import Vectors, cluster_centres, pairwise_distances
from vla_rl.algorithms.srpo.config import SrpoConfig


def paper_rewards(successes: Vectors, failures: Vectors, config: SrpoConfig) -> NDArray[np.float64]:
    """Compute rewards of the failures of one task (Fei et al. 2025, arXiv:2511.15605, section 3).

        d_i = min_c |h_i - c|^2                    over the centres c of the successes' clusters
        r_i = alpha * sigmoid(-(d_i - mean(d)) / std(d))

    mean and std (of the population, n) are over the failures of the task. Failures that are all
    equally far, and a single failure, get alpha / 2. A reward is relative to the other failures and
    cannot be compared across tasks or updates.

    Args:
        successes: float64 [S, D], S >= 1.
        failures: float64 [F, D], F >= 1.
        config: alpha and the clusters.

    Returns: float64 [F] in [0, alpha].
    """
    centres = cluster_centres(successes, config.clusters, config.radius_scale)
    distances = pairwise_distances(failures, centres).min(axis=1) ** 2
    return np.asarray(config.alpha * sigmoid(-_z_score(distances)))


def sigmoid(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Compute 1 / (1 + exp(-x)), without overflow."""
    return np.asarray(0.5 * (1.0 + np.tanh(0.5 * x)), dtype=np.float64)


def _z_score(distances: NDArray[np.float64]) -> NDArray[np.float64]:
    """Compute (d - mean) / std with the population's std; zeros if all are equal up to rounding."""
    # sorted, so that rounding does not depend on the order of the failures
    ordered = np.sort(distances)
    std = float(ordered.std())
    if std <= 1e-9 * float(ordered[-1]):
        return np.zeros_like(distances)
    return np.asarray((distances - ordered.mean()) / std)
