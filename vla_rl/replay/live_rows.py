"""The rows that can be sampled: in memory, by segment, oldest first."""

import zlib
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec
import numpy as np

from vla_rl.errors import ConfigError
from vla_rl.replay.config import ReplayConfig
from vla_rl.replay.sampling import STRATUM_FLAGS, Stratum, draw_positions, split_batch
from vla_rl.replay.segments import SegmentHeader, SegmentName
from vla_rl.replay.transitions import EpisodeRows, TransitionLayout, copy_rows


class RowStore:
    """An array of rows with a list of free slots; it grows if it is full.

    A batch is one `numpy.take` over the array, whatever the number of segments.

    Args:
        layout: type of the rows.
        capacity: rows for which address space is reserved. The system gives memory only to rows that
            are written.

    Raises: ConfigError if the system refuses that much.
    """

    def __init__(self, layout: TransitionLayout, capacity: int) -> None:
        self._dtype = layout.row_dtype
        try:
            # bytes and not rows: copies then include the padding, and rows stay equal byte by byte
            self._bytes = np.empty((capacity, self._dtype.itemsize), np.uint8)
        except MemoryError as error:
            raise ConfigError(
                f"the replay buffer's capacity is {capacity} rows of {self._dtype.itemsize} bytes, more than "
                "this machine has memory for; choose a smaller one, or float16 features"
            ) from error
        self._free = np.arange(capacity - 1, -1, -1)

    def add_rows(self, rows: np.ndarray) -> np.ndarray:
        """Copy rows in; return their slots, int64 [n]."""
        if len(rows) > len(self._free):
            self._grow(len(rows) - len(self._free))
        slots = self._free[len(self._free) - len(rows) :][::-1].copy()
        self._free = self._free[: len(self._free) - len(rows)]
        self._bytes[slots] = rows.view(np.uint8).reshape(len(rows), -1)
        return slots

    def remove_rows(self, slots: np.ndarray) -> None:
        """Free slots of rows that are dropped."""
        self._free = np.concatenate([self._free, slots[::-1]])

    def take_rows(self, slots: np.ndarray) -> np.ndarray:
        """Return a copy of the rows in these slots."""
        taken = np.take(self._bytes, slots, axis=0)
        rows: np.ndarray = taken.view(self._dtype)[:, 0]
        return rows

    def _grow(self, needed: int) -> None:
        old = len(self._bytes)
        # by a half at least: a data set that is imported episode by episode would copy all each time
        new = old + max(needed, old // 2)
        grown = np.empty((new, self._dtype.itemsize), np.uint8)
        grown[:old] = self._bytes
        self._bytes = grown
        self._free = np.concatenate([np.arange(new - 1, old - 1, -1), self._free])


SHARES: Final = {
    "success": "is_success", "demonstration": "is_demonstration", "intervened": "intervened"
}  # fmt: skip
"""Flags whose shares are metrics, by the metrics' names."""


class LiveSegment(msgspec.Struct, kw_only=True):
    """A segment whose rows are in memory."""

    header: SegmentHeader
    name: SegmentName
    slots: np.ndarray
    digests: dict[int, int]
    """CRC-32 of what was done and earned in each episode, by its id."""

    flags: dict[str, np.ndarray]
    """[n] each: the columns that strata and metrics read. They are apart from the rows, because reading a
    flag in each of 50,000 rows of 17 KB would touch as many pages of memory."""

    @property
    def num_rows(self) -> int:
        """Rows of the segment."""
        return len(self.slots)

    @property
    def num_episodes(self) -> int:
        """Episodes of the segment."""
        return len(self.digests)


class LiveRows:
    """Rows in memory, and which of them belong to a stratum.

    Args:
        layout: type of the rows.
        config: capacity and quota.
    """

    def __init__(self, layout: TransitionLayout, config: ReplayConfig) -> None:
        self._config = config
        self._store = RowStore(layout, config.capacity)
        self._segments: dict[int, LiveSegment] = {}
        self._positions: dict[Stratum, np.ndarray] = {}
        self.tasks: list[str] = []
        """Names that the column `task` counts; a name keeps its number for ever."""

    @property
    def num_rows(self) -> int:
        """Rows that can be sampled."""
        return sum(segment.num_rows for segment in self._segments.values())

    @property
    def num_episodes(self) -> int:
        """Episodes whose rows can be sampled."""
        return sum(segment.num_episodes for segment in self._segments.values())

    @property
    def names(self) -> tuple[SegmentName, ...]:
        """Names of the segments, oldest first."""
        return tuple(segment.name for segment in self._segments.values())

    def add_segment(self, header: SegmentHeader, name: SegmentName, rows: np.ndarray) -> None:
        """Copy the rows of a segment in, behind those of all others."""
        self.tasks += [task for task in header.tasks if task not in self.tasks]
        numbers = np.array([self.tasks.index(task) for task in header.tasks], np.int32)
        if (numbers != np.arange(len(numbers))).any():
            rows = copy_rows(rows)  # the caller's may still have to be written
            rows["task"] = numbers[rows["task"]]
        flags = {key: rows[key].copy() for key in ("head_version", "is_success", "has_expert")}
        flags["intervened"] = np.asarray(rows["intervened"].any(axis=1))
        flags["is_demonstration"] = np.full(len(rows), header.is_demonstration)
        self._segments[name.number] = LiveSegment(
            header=header,
            name=name,
            slots=self._store.add_rows(rows),
            digests=_digest_episodes(rows),
            flags=flags,
        )
        self._positions.clear()

    def list_changed(self, source: str, episodes: Sequence[EpisodeRows]) -> list[int]:
        """Return the ids that a source has here for other episodes than these."""
        stored: dict[int, int] = {}
        for segment in self._segments.values():
            if segment.header.source == source:
                stored |= segment.digests
        return [
            each.episode_id
            for each in episodes
            if each.episode_id in stored and stored[each.episode_id] != _digest(each.rows)
        ]

    def drop_oldest(self) -> list[int]:
        """Drop segments until the rows besides demonstrations are at most the capacity.

        Returns: the numbers of the dropped ones.
        """
        dropped = []
        kept = [each for each in self._segments.values() if not each.header.is_demonstration]
        while sum(each.num_rows for each in kept) > self._config.capacity:
            successes = sum(each.num_rows for each in kept if each.header.is_success)
            spare = [
                each
                for each in kept
                if not each.header.is_success
                or successes - each.num_rows >= self._config.min_success_rows
            ]
            oldest = (spare or kept)[0]
            kept.remove(oldest)
            del self._segments[oldest.name.number]
            self._store.remove_rows(oldest.slots)
            dropped.append(oldest.name.number)
        if dropped:
            self._positions.clear()
        return dropped

    def draw_rows(
        self, seed: int, update: int, batch: int, strata: Mapping[Stratum, float]
    ) -> np.ndarray:
        """Return a copy of the rows of a batch; each stratum with a share has a row."""
        slots = [
            (live := self._get_positions(name))[
                draw_positions(seed, update, name, count, len(live))
            ]
            for name, count in split_batch(batch, strata).items()
            if count
        ]
        return self._store.take_rows(np.concatenate(slots))

    def list_missing(self, strata: Mapping[Stratum, float]) -> list[Stratum]:
        """Return the strata with a share and without a row."""
        return [
            name for name, share in strata.items() if share and not len(self._get_positions(name))
        ]

    def describe(self, head_version: int) -> dict[str, float]:
        """Return metrics: sizes, shares, and the mean age of a row in updates."""
        if not self._segments:
            return {"replay/rows": 0.0}
        versions = self._read_flag("head_version")
        return {
            "replay/rows": float(len(versions)),
            "replay/episodes": float(self.num_episodes),
            **{
                f"replay/{name}_share": float(self._read_flag(flag).mean())
                for name, flag in SHARES.items()
            },
            "replay/age": float(head_version - versions.mean()),
        }

    def _read_flag(self, name: str) -> np.ndarray:
        """Return one of `LiveSegment.flags` of all rows, oldest first."""
        return np.concatenate([segment.flags[name] for segment in self._segments.values()])

    def _get_positions(self, stratum: Stratum) -> np.ndarray:
        """Return the slots of a stratum's rows, int64 [n], oldest first."""
        if not self._segments:
            return np.zeros(0, np.int64)
        if stratum not in self._positions:
            slots = np.concatenate([segment.slots for segment in self._segments.values()])
            flag, is_set = STRATUM_FLAGS[stratum]
            if flag is not None:
                slots = slots[self._read_flag(flag) == is_set]
            self._positions[stratum] = slots
        return self._positions[stratum]


def _digest_episodes(rows: np.ndarray) -> dict[int, int]:
    """Return the digest of each episode by its id; the rows of an episode follow each other."""
    starts = np.flatnonzero(np.diff(rows["episode"]) != 0) + 1
    return {int(part["episode"][0]): _digest(part) for part in np.split(rows, starts)}


def _digest(rows: np.ndarray) -> int:
    return zlib.crc32(rows["rewards"].tobytes(), zlib.crc32(rows["action"].tobytes()))
