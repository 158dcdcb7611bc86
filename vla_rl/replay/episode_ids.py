"""Ids of episodes by source, so that none is stored twice."""

from collections.abc import Mapping, Sequence
from typing import Self, TypeAlias

import numpy as np

from vla_rl.replay.transitions import EpisodeRows

IdRanges: TypeAlias = tuple[tuple[int, int], ...]
"""First and last id of each range without a gap. A run's ids are nearly one range."""


class EpisodeIds:
    """The ids of all episodes that a buffer has stored, dropped ones included."""

    def __init__(self) -> None:
        self._ids: dict[str, set[int]] = {}

    @classmethod
    def from_ranges(cls, ranges: Mapping[str, IdRanges]) -> Self:
        """Return the ids that `as_ranges` returned."""
        made = cls()
        for source, each in ranges.items():
            made._ids[source] = {id for first, last in each for id in range(first, last + 1)}
        return made

    def as_ranges(self) -> dict[str, IdRanges]:
        """Return the ids as ranges, by source, for a checkpoint."""
        return {source: _join_ids(ids) for source, ids in self._ids.items()}

    def select_new(self, source: str, episodes: Sequence[EpisodeRows]) -> list[EpisodeRows]:
        """Return the episodes that are not stored yet, each id once."""
        known = self._ids.get(source, set())
        by_id = {
            episode.episode_id: episode
            for episode in reversed(episodes)
            if episode.episode_id not in known
        }
        # `reversed` twice: of two episodes with one id, the first counts
        return list(reversed(by_id.values()))

    def add(self, source: str, episodes: np.ndarray) -> None:
        """Add the ids of a source's rows, int64 [n]."""
        self._ids.setdefault(source, set()).update(np.unique(episodes).tolist())


def _join_ids(ids: set[int]) -> IdRanges:
    if not ids:
        return ()
    ordered = np.sort(np.fromiter(ids, np.int64, len(ids)))
    breaks = np.flatnonzero(np.diff(ordered) != 1)
    firsts = ordered[np.concatenate([[0], breaks + 1])]
    lasts = ordered[np.concatenate([breaks, [len(ordered) - 1]])]
    return tuple(zip(firsts.tolist(), lasts.tolist(), strict=True))
