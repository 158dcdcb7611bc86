"""Successes of earlier updates, as references for tasks without a success in the current update."""

from collections import deque
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray


class BankedTask(msgspec.Struct, frozen=True):
    """Content of the bank for one task, oldest first."""

    embeddings: np.ndarray
    """Embeddings of the successes, float32 [R, T, D]."""

    updates: np.ndarray
    """Update of each success, int64 [R]."""


class ReferenceBank:
    """The newest successes of every task, at most `size` of each; the oldest is dropped first.

    The bank has state, so it has an owner: the reward node calls `references` and then passes the
    update's own successes to `add`. Save it with `state`, which is plain arrays by task.

    Args:
        size: number of successes kept per task; 0 keeps none.
    """

    def __init__(self, size: int) -> None:
        if size < 0:
            raise ValueError(f"size is {size}, expected at least 0 successes a task.")
        self._size = size
        self._kept: dict[str, deque[tuple[int, NDArray[np.float32]]]] = {}

    def add(
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
