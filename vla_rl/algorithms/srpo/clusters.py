"""Clusters of successes, so that several ways to solve a task become several references.

The first call imports scikit-learn, which takes a second or two: call it from a thread if an event
loop must not wait.
"""

import numpy as np
from numpy.typing import NDArray

Vectors = NDArray[np.float64]


def cluster_centres(successes: Vectors, clusters: str, radius_scale: float) -> Vectors:
    """Return the means of the clusters that successes form.

    Successes outside every cluster are returned unchanged.

        k_distance   DBSCAN (Ester et al. 1996), min_samples 2,
                     radius = radius_scale * median over successes of the distance to the nearest other success
        hdbscan      HDBSCAN (Campello et al. 2013), min_cluster_size 2, all of them in one cluster allowed

    The paper (arXiv:2511.15605) clusters with DBSCAN and gives no settings. Ours: the radius
    follows the data, and its median replaces the knee of the k-distance plot, which a handful of
    points does not have. A success outside every cluster is a reference of its own, because it did
    succeed.

    Args:
        successes: float64 [S, D], S >= 1, in any order: the result is the same to the last bit.
        clusters: `k_distance` or `hdbscan`.
        radius_scale: > 0, for `k_distance`.

    Returns: float64 [C, D], 1 <= C <= S; the clusters' means first, then the lone successes.
    """
    if len(successes) == 1:
        return successes.copy()
    successes = in_canonical_order(successes)
    distances = pairwise_distances(successes, successes)
    labels = (
        _hdbscan_labels(distances)
        if clusters == "hdbscan"
        else _k_distance_labels(distances, radius_scale)
    )
    return np.concatenate([cluster_means(successes, labels), successes[labels == -1]])


def in_canonical_order(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """Order rows by their bytes, so that the rounding of their sums is always the same."""
    return rows[sorted(range(len(rows)), key=lambda row: rows[row].tobytes())]


def pairwise_distances(rows: Vectors, others: Vectors) -> Vectors:
    """Compute Euclidean distances [len(rows), len(others)].

    They have no cancellation, unlike the |a|^2 - 2ab + |b|^2 form.
    """
    distances = np.empty((len(rows), len(others)))
    for index, row in enumerate(rows):
        distances[index] = np.linalg.norm(others - row, axis=1)
    return distances


def dbscan_labels(distances: Vectors, radius: float) -> NDArray[np.int64]:
    """Assign S points to clusters, -1 for none: DBSCAN with min_samples 2 on distances [S, S]."""
    from sklearn.cluster import DBSCAN  # slow to import, needed only here

    return np.asarray(
        DBSCAN(eps=radius, min_samples=2, metric="precomputed").fit(distances).labels_,
        dtype=np.int64,
    )


def cluster_means(points: Vectors, labels: NDArray[np.int64]) -> Vectors:
    """Return the mean of each cluster by its number, float64 [C, D].

    Points labelled -1 belong to none.
    """
    means = [points[labels == label].mean(axis=0) for label in range(labels.max(initial=-1) + 1)]
    return np.stack(means) if means else np.empty((0, points.shape[1]))


def _k_distance_labels(distances: Vectors, radius_scale: float) -> NDArray[np.int64]:
    to_others = distances + np.diag(np.full(len(distances), np.inf))
    radius = radius_scale * float(np.median(to_others.min(axis=1)))
    return dbscan_labels(distances, max(radius, float(np.finfo(np.float64).tiny)))


def _hdbscan_labels(distances: Vectors) -> NDArray[np.int64]:
    from sklearn.cluster import HDBSCAN  # slow to import, needed only here

    if not distances.any():
        # one cluster: identical points have no finite density
        return np.zeros(len(distances), np.int64)
    found = HDBSCAN(
        min_cluster_size=2, allow_single_cluster=True, metric="precomputed", copy=True
    ).fit(distances)
    return np.asarray(found.labels_, dtype=np.int64)
