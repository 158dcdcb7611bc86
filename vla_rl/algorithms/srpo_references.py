"""What failures are measured against: centres of the clusters that a task's successes form.

Two rules: `paper_centres` with a radius taken from the data, so that several ways to succeed become several references,
and `released_centres`, the settings of the authors' released code. scikit-learn is imported at the first call, which
takes a second or two: call from a thread where a loop must not wait.
"""

import numpy as np
from numpy.typing import NDArray

Embeddings = NDArray[np.float64]


def paper_centres(successes: Embeddings, radius_scale: float) -> Embeddings:
    """DBSCAN centres of successes (Ester et al. 1996), with the radius taken from their k-distances.

        radius = radius_scale * median over successes of the distance to the nearest other success

    The paper (arXiv:2511.15605) gives no DBSCAN settings. Ours: min_samples 2; a success outside every cluster is a
    centre of its own, because it did succeed. The median stands for the knee of the k-distance plot, which a handful of
    points does not have.

    Args:
        successes: float64 [S, D], S >= 1.
        radius_scale: > 0; how much farther apart than its usual neighbours a success may lie and still belong.

    Returns: float64 [C, D], 1 <= C <= S; clusters' means first, then the lone successes in their order.
    """
    if len(successes) == 1:
        return successes.copy()
    distances = pairwise_distances(successes, successes)
    np.fill_diagonal(distances, np.inf)
    radius = radius_scale * float(np.median(distances.min(axis=1)))
    np.fill_diagonal(distances, 0.0)
    labels = _dbscan_labels(distances, max(radius, float(np.finfo(np.float64).tiny)))
    return np.concatenate([_cluster_means(successes, labels), successes[labels == -1]])


def released_centres(successes: Embeddings) -> Embeddings:
    """The released code's centres: DBSCAN(eps 0.5, min_samples 2) on standardised successes, noise ignored.

    Without a cluster, which is the rule in many dimensions, the mean of all successes is the only centre.

    Args:
        successes: float64 [S, D], S >= 1.

    Returns: float64 [C, D], C >= 1, in the space of the input.
    """
    from sklearn.preprocessing import StandardScaler  # slow to import, needed only here

    scaler = StandardScaler().fit(successes)
    scaled = scaler.transform(successes)
    labels = _dbscan_labels(pairwise_distances(scaled, scaled), 0.5)
    means = _cluster_means(scaled, labels)
    centres: Embeddings = scaler.inverse_transform(means) if len(means) else successes.mean(axis=0, keepdims=True)
    return centres


def pairwise_distances(rows: Embeddings, others: Embeddings) -> Embeddings:
    """Euclidean distances [len(rows), len(others)], without the cancellation of the |a|^2 - 2ab + |b|^2 form."""
    distances = np.empty((len(rows), len(others)))
    for index, row in enumerate(rows):
        distances[index] = np.linalg.norm(others - row, axis=1)
    return distances


def _dbscan_labels(distances: Embeddings, radius: float) -> NDArray[np.int64]:
    from sklearn.cluster import DBSCAN  # slow to import, needed only here

    return np.asarray(DBSCAN(eps=radius, min_samples=2, metric="precomputed").fit(distances).labels_, dtype=np.int64)


def _cluster_means(points: Embeddings, labels: NDArray[np.int64]) -> Embeddings:
    means = [points[labels == label].mean(axis=0) for label in range(labels.max(initial=-1) + 1)]
    return np.stack(means) if means else np.empty((0, points.shape[1]))
