"""SRPO's rules: the reward of a task's failures, given its successes.

`aligned` is ours: the share of its nearest success that a failure retraced, in order.

    reference  r_1 ── r_2 ── r_3 ── r_4 ── r_5        5 moments of a success
                │      │      │      :      :
    failure    f_1 ── f_2 ── f_3 ── f_3 ── f_3        followed it to r_3: a little over 3/5

`paper` measures the distance of a whole trajectory from the successes' clusters, relative to the other
failures; `released` is the rule of the authors' code with its constants, for comparison. They compare
whole trajectories by one vector each, so a failure that stops early is far from every success in most of
its frames, wherever it stopped. `aligned` aligns time first. The study in `docs/srpo.md` compares the
rules.

The first call that clusters imports scikit-learn, which takes a second or two: call it from a thread if
an event loop must not wait.
"""

from typing import Annotated, ClassVar, Literal, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from vla_rl.types import FINITE, Config, NonNegativeInt, ReadIf, Share

Vectors = NDArray[np.float64]
Rule: TypeAlias = Literal["aligned", "paper", "released"]
Clustering: TypeAlias = Literal["hdbscan", "k_distance"]


class SrpoConfig(Config, frozen=True, kw_only=True):
    """Settings of the rewards that distances to the references become."""

    # options that the chosen rule does not read are reported: a sweep over them would show a
    # difference that is noise
    READ_IF: ClassVar[tuple[ReadIf, ...]] = (
        ReadIf(("alpha",), "rule", ("paper", "aligned")),
        ReadIf(("clusters", "radius_scale"), "rule", ("paper",)),
        ReadIf(("radius_scale",), "clusters", ("k_distance",)),
        ReadIf(("carry_over",), "references", ("task",)),
    )

    rule: Rule = "aligned"
    """Reward rule of failures. `aligned`: the share of the nearest success that the failure
    retraced (ours). `paper`: distances between whole trajectories, z-score, sigmoid, alpha.
    `released`: the authors' code with its fixed constants."""

    references: Literal["group", "task"] = "task"
    """Successes that a failure is compared with. `task`: those of its task, from all groups of the
    update, as in the paper. `group`: those of its own group, for tasks whose starts show different
    places; a group without a success gets rewards of 0."""

    alpha: Share = 0.8
    """Weight of a failure's progress for `paper` and `aligned`; 0 gives the plain
    success reward."""

    clusters: Clustering = "k_distance"
    """Clustering of successes into references, for `paper`. `k_distance`: DBSCAN with a radius
    computed from the data. `hdbscan`: clusters of any density; needs dozens of successes per
    task."""

    radius_scale: Annotated[float, msgspec.Meta(gt=0, le=FINITE)] = 1.5
    """Radius of `k_distance`, in multiples of the median distance between neighbouring
    successes."""

    carry_over: NonNegativeInt = 16
    """Number of the newest successes kept per task as references for updates in which the task is
    not solved; 0 keeps none."""


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
    # row by row: the short form cancels for embeddings that lie close together, and successes of
    # one task do
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
    # a success would be its own nearest neighbour, at the distance 0
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
    # centred before squares are taken: embeddings of one task share a large mean, which would
    # cancel the digits of their differences
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
    # several ways to succeed are several centres: their mean may lie where no way to succeed is
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
