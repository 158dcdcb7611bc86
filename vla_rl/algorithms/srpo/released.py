"""The rule of the authors' released code, with its constants, for comparison and parity tests."""

import numpy as np
from numpy.typing import NDArray

from vla_rl.algorithms.srpo.clusters import (
    Vectors,
    cluster_means,
    dbscan_labels,
    in_canonical_order,
    pairwise_distances,
)
from vla_rl.algorithms.srpo.paper import sigmoid


def released_rewards(successes: Vectors, failures: Vectors) -> NDArray[np.float64]:
    """Compute rewards of the failures of one task, as the released code does.

        d_i = min_c |h_i - c|,  s_i = (d_i - min(d)) / (max(d) - min(d))
        r_i = 0.6 * sigmoid(10 * (0.5 - s_i))

    min and max are over the failures of the task, so the nearest one gets 0.595984 and the farthest
    0.004016, whatever they did. If max - min is below 1e-6, and for a single failure, all get 0.3.

    Args:
        successes: float64 [S, D], S >= 1.
        failures: float64 [F, D], F >= 1.

    Returns: float64 [F].
    """
    distances = pairwise_distances(failures, released_centres(successes)).min(axis=1)
    spread = float(np.ptp(distances))
    scaled = (
        (distances - distances.min()) / spread if spread >= 1e-6 else np.full_like(distances, 0.5)
    )
    return np.asarray(0.6 * sigmoid(10.0 * (0.5 - scaled)))


def released_centres(successes: Vectors) -> Vectors:
    """Cluster standardised successes with DBSCAN(eps 0.5, min_samples 2); return the centres.

    Lone successes are ignored.

    Without a cluster, the usual case in many dimensions, the mean of all successes is the only
    centre.

    Returns: float64 [C, D], C >= 1, in the space of the input.
    """
    from sklearn.preprocessing import StandardScaler  # slow to import, needed only here

    successes = in_canonical_order(successes)
    scaler = StandardScaler().fit(successes)
    scaled = scaler.transform(successes)
    labels = dbscan_labels(pairwise_distances(scaled, scaled), 0.5)
    means = cluster_means(scaled, labels)
    centres: Vectors = (
        scaler.inverse_transform(means) if len(means) else successes.mean(axis=0, keepdims=True)
    )
    return centres
