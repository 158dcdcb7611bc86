"""Statistics of features: of an episode (`stats/...`) and of a data set (`meta/stats.json`)."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from vla_rl.datasets.arrow import pa
from vla_rl.datasets.episode import RecordedEpisode
from vla_rl.datasets.lerobot.columns import feature_name
from vla_rl.datasets.lerobot.layout import KNOWN_FIELDS, Feature
from vla_rl.errors import DataError
from vla_rl.util.foreign_data import get_whole_number, reading


class Stats(msgspec.Struct, frozen=True):
    """Statistics of one feature: float64 arrays of its shape; of images [3, 1, 1] in [0, 1]."""

    min: np.ndarray
    max: np.ndarray
    mean: np.ndarray
    std: np.ndarray
    count: int

    @classmethod
    def of_rows(cls, rows: np.ndarray) -> "Stats":
        """Compute the statistics over the first axis."""
        rows = rows.astype(np.float64)
        return cls(rows.min(0), rows.max(0), rows.mean(0), rows.std(0), len(rows))

    @classmethod
    def of_values(cls, values: Mapping[str, Any], place: str) -> "Stats":
        """Return the inverse of `values`. Raises: DataError if they are no statistics."""
        with reading(place, "statistics of one feature", "write the data set again"):
            low, high, mean, std = (
                np.asarray(values[name], np.float64) for name in ("min", "max", "mean", "std")
            )
            (count,) = values["count"]
            if len({low.shape, high.shape, mean.shape, std.shape}) > 1:
                raise ValueError(f"the shapes are {low.shape}, {high.shape} and {mean.shape}")
            number = get_whole_number({"count": count}, "count", place)
            if number == 0:
                raise ValueError("count is 0")
        return cls(low, high, mean, std, number)

    def values(self) -> dict[str, Any]:
        """Return the statistics as plain lists."""
        arrays = {"min": self.min, "max": self.max, "mean": self.mean, "std": self.std}
        return {
            **{name: np.atleast_1d(array).tolist() for name, array in arrays.items()},
            "count": [self.count],
        }

    def with_more(self, other: "Stats") -> "Stats":
        """Return the statistics of both together."""
        count = self.count + other.count
        share = other.count / count
        mean = self.mean + (other.mean - self.mean) * share
        variance = (
            self.std**2 * (1 - share)
            + other.std**2 * share
            + (self.mean - other.mean) ** 2 * share * (1 - share)
        )
        return Stats(
            np.minimum(self.min, other.min),
            np.maximum(self.max, other.max),
            mean,
            np.sqrt(variance),
            count,
        )


def stats_of(
    episode: RecordedEpisode, features: Mapping[str, Feature], table: "pa.Table"
) -> dict[str, Stats]:
    """Return the statistics of one episode, given its table."""
    readers = {
        feature_name(key) if key in KNOWN_FIELDS else f"observation.images.{key}": read
        for key, read in episode.frames.items()
    }
    found = {}
    for name, feature in features.items():
        if feature.dtype == "image":
            pixels = np.stack([readers[name](step) for step in range(episode.num_steps)]).reshape(
                -1, 3
            )
            found[name] = _of_pixels(pixels, episode.num_steps)
        else:
            found[name] = Stats.of_rows(
                np.array(table.column(name).to_pylist(), np.float64).reshape(len(table), -1)
            )
    return found


def noted_stats(row: Mapping[str, Any], features: Iterable[str], path: Path) -> dict[str, Stats]:
    """Return the statistics in an episode's row of `meta/episodes`.

    Raises: DataError if one is missing or none.
    """
    kinds = ("min", "max", "mean", "std", "count")
    found = {name: {kind: row.get(f"stats/{name}/{kind}") for kind in kinds} for name in features}
    episode = row.get("episode_index")
    for name, values in found.items():
        if lost := [kind for kind, value in values.items() if value is None]:
            raise DataError(
                f"{path} has no 'stats/{name}/{lost[0]}' of episode {episode}, expected statistics of "
                "every feature; was the data set written by another program?"
            )
    return {
        name: Stats.of_values(values, f"{path}: 'stats/{name}' of episode {episode}")
        for name, values in found.items()
    }


def merged(one: Mapping[str, Stats], other: Mapping[str, Stats]) -> dict[str, Stats]:
    """Merge the statistics of two parts of a data set. Raises: DataError if shapes differ."""
    for name, stats in other.items():
        if name in one and one[name].mean.shape != stats.mean.shape:
            raise DataError(
                f"the statistics of {name!r} have the shapes {one[name].mean.shape} and "
                f"{stats.mean.shape}, expected the same in every episode; write the data set again."
            )
    return {
        name: one[name].with_more(stats) if name in one else stats for name, stats in other.items()
    }


def _of_pixels(pixels: np.ndarray, num_frames: int) -> Stats:
    """Compute the statistics of uint8 [N, 3].

    The spread comes from sums, which avoids a copy in float64.
    """
    mean = pixels.mean(axis=0, dtype=np.float64)
    square = np.array(
        [np.dot(channel, channel) for channel in pixels.T.astype(np.float32)], np.float64
    ) / len(pixels)
    std = np.sqrt(np.maximum(square - mean**2, 0.0))
    shape = (3, 1, 1)
    found = (pixels.min(axis=0), pixels.max(axis=0), mean, std)
    low, high, mean, std = (
        np.asarray(values, np.float64).reshape(shape) / 255.0 for values in found
    )
    return Stats(low, high, mean, std, num_frames)
