"""SRPO's self-referential reward: a failure earns by how close it came to the successes of its own task.

    embeddings of a batch ─► per task: successes ─► centres ─► failures' distances ─► progress in (0, 1) ─► rewards

Called by the reward node with all trajectories of an update (all ranks), so that a group without a success is measured
against successes of other groups of the same task. Always: successes get 1, failures less than 1, and the result does
not depend on the order of the rows.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from vla_rl.algorithms.choices import check_choice
from vla_rl.algorithms.srpo_references import pairwise_distances, paper_centres, released_centres
from vla_rl.types import Config

RULES = ("paper", "released")


class SrpoConfig(Config, frozen=True):
    """How distances to the references become rewards."""

    rule: str = "paper"
    """`paper`: squared L2, z-score, sigmoid, alpha. `released`: the authors' code with its fixed constants."""

    alpha: float = 0.8
    """Weight of a failure's progress under the paper's rule, in [0, 1]; 0 is the plain success reward."""

    radius_scale: float = 1.5
    """Cluster radius under the paper's rule, in multiples of the usual distance between neighbouring successes; > 0."""

    def __post_init__(self) -> None:
        check_choice(RULES, self.rule, "SrpoConfig.rule")
        self.require(0.0 <= self.alpha <= 1.0, "alpha", "a weight in [0, 1]")
        self.require(0.0 < self.radius_scale < float("inf"), "radius_scale", "a finite factor > 0")


def srpo_rewards(
    embeddings: NDArray[np.float32],
    is_success: NDArray[np.bool_],
    tasks: Sequence[str],
    config: SrpoConfig,
    episode_ids: Sequence[int] = (),
) -> NDArray[np.float32]:
    """Rewards of one batch of trajectories (Fei et al. 2025, arXiv:2511.15605).

        r_i = 1                                    where i succeeded
        d_i = min_c |h_i - c|^2                    over the centres c of the successes of i's task
        r_i = alpha * sigmoid(-(d_i - mean(d)) / std(d))          rule "paper"
        d_i = min_c |h_i - c|,  s_i = (d_i - min(d)) / (max(d) - min(d))
        r_i = 0.6 * sigmoid(10 * (0.5 - s_i))                     rule "released"

    mean, std (of the population), min and max run over the failures of the task. Failures that are all equally far, or a
    single one, get alpha / 2 ("paper") or 0.3 ("released"). A task without a success gives its failures 0. Under
    "released" an embedding of zeros scores 0 and is no reference, as in that code.

    Args:
        embeddings: float32 [N, D], one per trajectory, by its own identity.
        is_success: bool [N].
        tasks: N names; only trajectories of the same task are compared.
        config: the rule and its numbers.
        episode_ids: N ids to name a bad trajectory by; without them its row is named.

    Returns: float32 [N] in [0, 1]. Raises: ValueError for sizes that differ or an embedding that is not finite.
    """
    points = _checked(embeddings, is_success, tasks, episode_ids)
    success = np.asarray(is_success, dtype=bool)
    usable = np.ones(len(points), dtype=bool) if config.rule == "paper" else points.any(axis=1)
    rewards = np.where(success & usable, 1.0, 0.0)
    task_names = np.asarray(tasks, dtype=object)
    for task in dict.fromkeys(tasks):
        members = (task_names == task) & usable
        successes, failures = members & success, members & ~success
        if successes.any() and failures.any():
            rewards[failures] = _failure_rewards(points[successes], points[failures], config)
    return rewards.astype(np.float32)


def _failure_rewards(
    successes: NDArray[np.float64], failures: NDArray[np.float64], config: SrpoConfig
) -> NDArray[np.float64]:
    if config.rule == "released":
        distances = pairwise_distances(failures, released_centres(successes)).min(axis=1)
        rewards = 0.6 * _sigmoid(10.0 * (0.5 - _min_max(distances)))
    else:
        distances = pairwise_distances(failures, paper_centres(successes, config.radius_scale)).min(axis=1) ** 2
        rewards = config.alpha * _sigmoid(-_z_score(distances))
    return rewards


def _z_score(distances: NDArray[np.float64]) -> NDArray[np.float64]:
    """(d - mean) / std with the population's std; zeros where all are equal up to rounding."""
    std = float(distances.std())
    if std <= 1e-9 * float(distances.max()):
        return np.zeros_like(distances)
    return np.asarray((distances - distances.mean()) / std)


def _min_max(distances: NDArray[np.float64]) -> NDArray[np.float64]:
    """(d - min) / (max - min); halves where the range is below 1e-6, as in the released code."""
    spread = float(np.ptp(distances))
    if spread < 1e-6:
        return np.full_like(distances, 0.5)
    return np.asarray((distances - distances.min()) / spread)


def _sigmoid(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray(0.5 * (1.0 + np.tanh(0.5 * x)), dtype=np.float64)


def _checked(
    embeddings: NDArray[np.float32], is_success: NDArray[np.bool_], tasks: Sequence[str], episode_ids: Sequence[int]
) -> NDArray[np.float64]:
    if embeddings.ndim != 2:
        raise ValueError(f"embeddings are {list(embeddings.shape)}, expected [N, D]: one vector a trajectory.")
    num = len(embeddings)
    if len(is_success) != num or len(tasks) != num or len(episode_ids) not in (0, num):
        raise ValueError(
            f"{num} embeddings, {len(is_success)} is_success, {len(tasks)} tasks, {len(episode_ids)} episode_ids; "
            "expected one of each per trajectory (episode_ids may be left out)."
        )
    bad = np.flatnonzero(~np.isfinite(embeddings).all(axis=1))
    if len(bad):
        row = int(bad[0])
        name = f"episode {episode_ids[row]}" if len(episode_ids) else f"row {row}"
        raise ValueError(
            f"embedding of {name} (task {tasks[row]!r}) is not finite; expected finite numbers; check its encoder."
        )
    return embeddings.astype(np.float64)
