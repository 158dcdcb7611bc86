"""SRPO's self-referential reward.

A failure's reward depends on how close it came to the successes of its own task.

    embeddings of a batch ─► per task: successes, else those carried over ─► rule ─► rewards of the failures

The reward node calls this with all trajectories of an update (all ranks), so that a group without a
success is compared with successes of other groups of the same task. Successes always get 1 and
failures less than 1, and the result does not depend on the order of the rows. `ReferenceBank` carries
successes over to updates in which their task is not solved.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from vla_rl.algorithms.srpo.rules import (
    SrpoConfig,
    aligned_rewards,
    paper_rewards,
    released_rewards,
)

NOTHING_CARRIED: Final = MappingProxyType[str, NDArray[np.float32]]({})
BELOW_ONE: Final = float(np.nextafter(np.float32(1.0), np.float32(0.0)))


def srpo_rewards(
    embeddings: NDArray[np.float32],
    is_success: NDArray[np.bool_],
    tasks: Sequence[str],
    config: SrpoConfig,
    episode_ids: Sequence[int] = (),
    carried: Mapping[str, NDArray[np.float32]] = NOTHING_CARRIED,
) -> NDArray[np.float32]:
    """Compute the rewards of one batch of trajectories (Fei et al. 2025, arXiv:2511.15605).

        r_i = 1                                    if i succeeded
        r_i = rule(failures, references)           of i's task otherwise: `aligned`, `paper` or `released`
        r_i = 0                                    if the task has no reference

    The references of a task are its successes in the batch; without any, those `carried` over.
    `paper` and `released` compare whole trajectories by the mean over their T vectors, because both
    average V-JEPA 2's tokens. With `released`, an embedding of zeros gets 0, even for a success,
    and is no reference, as in that code.

    Args:
        embeddings: float32 [N, T, D], T moments of each trajectory in the order of time; [N, D] is
            T = 1.
        is_success: bool [N].
        tasks: N names; only trajectories of the same task are compared.
        config: the rule and its numbers.
        episode_ids: N ids that name a trajectory in errors; without them, errors name the row.
        carried: successes of earlier updates by task, float32 [R, T, D] each, R >= 1.

    Returns: float32 [N] in [0, 1], below 1 for every failure.
    Raises: ValueError for sizes that differ or an embedding that is not finite.
    """
    points = _checked(embeddings, is_success, tasks, episode_ids)
    success = np.asarray(is_success, dtype=bool)
    # the released code embeds a trajectory without frames as zeros, and neither rewards it nor
    # compares with it
    usable = (
        points.any(axis=(1, 2)) if config.rule == "released" else np.ones(len(points), dtype=bool)
    )
    rewards = np.where(success & usable, 1.0, 0.0)
    task_names = np.asarray(tasks, dtype=object)
    for task in dict.fromkeys(tasks):
        members = (task_names == task) & usable
        references, failures = points[members & success], members & ~success
        if not len(references) and task in carried:
            references = _checked_carried(carried[task], points, task)
        if len(references) and failures.any():
            earned = _failure_rewards(references, points[failures], config)
            # a failure that retraced everything must still rank below a success, also after it was
            # rounded to float32
            rewards[failures] = np.minimum(earned, BELOW_ONE)
    return rewards.astype(np.float32)


def _failure_rewards(
    references: NDArray[np.float64], failures: NDArray[np.float64], config: SrpoConfig
) -> NDArray[np.float64]:
    if config.rule == "aligned":
        return aligned_rewards(references, failures, config)
    references, failures = references.mean(axis=1), failures.mean(axis=1)
    if config.rule == "released":
        return released_rewards(references, failures)
    return paper_rewards(references, failures, config)


def _checked(
    embeddings: NDArray[np.float32],
    is_success: NDArray[np.bool_],
    tasks: Sequence[str],
    episode_ids: Sequence[int],
) -> NDArray[np.float64]:
    """Return the embeddings as float64 [N, T, D], checked for shape, lengths and finite numbers."""
    if embeddings.ndim not in (2, 3):
        raise ValueError(
            f"embeddings are {list(embeddings.shape)}, expected [N, T, D]: T vectors a "
            "trajectory, or [N, D] for one."
        )
    num = len(embeddings)
    if len(is_success) != num or len(tasks) != num or len(episode_ids) not in (0, num):
        raise ValueError(
            f"{num} embeddings, {len(is_success)} is_success, {len(tasks)} tasks, "
            f"{len(episode_ids)} episode_ids; expected one of each per trajectory (episode_ids may "
            "be left out)."
        )
    points = (
        embeddings.astype(np.float64).reshape(num, -1, embeddings.shape[-1])
        if num
        else np.empty((0, 1, 1))
    )
    # one NaN would reach every failure of its task: distances are taken to all successes, and the
    # paper's z-score mixes all failures
    bad = np.flatnonzero(~np.isfinite(points).all(axis=(1, 2)))
    if len(bad):
        row = int(bad[0])
        name = f"episode {episode_ids[row]}" if len(episode_ids) else f"row {row}"
        raise ValueError(
            f"embedding of {name} (task {tasks[row]!r}) is not finite; expected finite numbers; "
            "check its encoder."
        )
    return points


def _checked_carried(
    carried: NDArray[np.float32], points: NDArray[np.float64], task: str
) -> NDArray[np.float64]:
    references = carried.astype(np.float64).reshape(len(carried), -1, carried.shape[-1])
    # a resume with another encoder finds the old one's embeddings in its checkpoint: distances
    # between the two mean nothing
    if references.shape[1:] != points.shape[1:]:
        raise ValueError(
            f"successes carried over for task {task!r} are {list(references.shape[1:])}, this "
            f"update's embeddings {list(points.shape[1:])}; another encoder wrote them: start with "
            "an empty bank."
        )
    return references


class BankedTask(msgspec.Struct, frozen=True):
    """Content of the bank for one task, oldest first."""

    embeddings: np.ndarray
    """Embeddings of the successes, float32 [R, T, D]."""

    updates: np.ndarray
    """Update of each success, int64 [R]."""


class ReferenceBank:
    """The newest successes of every task, at most `size` of each; the oldest is dropped first.

    The bank has state, so it has an owner: the reward node calls `references` and then passes the
    update's own successes to `add_successes`. Save it with `state`, which is plain arrays by task.

    Args:
        size: number of successes kept per task; 0 keeps none.
    """

    def __init__(self, size: int) -> None:
        if size < 0:
            raise ValueError(f"size is {size}, expected at least 0 successes a task.")
        self._size = size
        self._kept: dict[str, deque[tuple[int, NDArray[np.float32]]]] = {}

    def add_successes(
        self,
        update: int,
        embeddings: NDArray[np.float32],
        is_success: NDArray[np.bool_],
        tasks: Sequence[str],
    ) -> None:
        """Keep the successes of an update.

        Embeddings are float32 [N, T, D], one for each of `is_success` and `tasks`.

        If an update is repeated, as after a resume, its new successes replace those of the first
        time.
        """
        if self._size == 0:
            return
        # a resumed run repeats updates after its checkpoint: kept twice, one success would count as
        # two
        for task, kept in self._kept.items():
            self._kept[task] = deque((each for each in kept if each[0] < update), maxlen=self._size)
        for row in np.flatnonzero(is_success):
            kept = self._kept.setdefault(tasks[row], deque(maxlen=self._size))
            kept.append((update, np.array(embeddings[row], np.float32)))

    def references(
        self, tasks: Sequence[str], is_success: NDArray[np.bool_]
    ) -> dict[str, NDArray[np.float32]]:
        """Return the kept successes of those tasks that have no success of their own.

        float32 [R, T, D] for each.
        """
        solved = {tasks[row] for row in np.flatnonzero(is_success)}
        missing = [
            task for task in dict.fromkeys(tasks) if task not in solved and self._kept.get(task)
        ]
        return {
            task: np.stack([embedding for _, embedding in self._kept[task]]) for task in missing
        }

    def metrics(self, update: int) -> dict[str, float]:
        """Return how many successes are kept, and how many updates old they are as of `update`."""
        ages = [update - kept_at for kept in self._kept.values() for kept_at, _ in kept]
        if not ages:
            return {"reward/bank_size": 0.0}
        return {
            "reward/bank_size": float(len(ages)),
            "reward/bank_age_mean": float(np.mean(ages)),
            "reward/bank_age_max": float(max(ages)),
        }

    def state(self) -> dict[str, BankedTask]:
        """Return the whole bank by task, as plain arrays: a part of a checkpoint."""
        return {
            task: BankedTask(
                embeddings=np.stack([embedding for _, embedding in kept]),
                updates=np.array([update for update, _ in kept], np.int64),
            )
            for task, kept in self._kept.items()
            if kept
        }

    def restore(self, state: Mapping[str, BankedTask]) -> None:
        """Continue from a `state`; a smaller bank keeps its newest entries."""
        self._kept = {
            task: deque(
                zip(banked.updates.tolist(), banked.embeddings, strict=True), maxlen=self._size
            )
            for task, banked in state.items()
        }
