"""Write a LeRobotDataset v3.0 with its statistics, an episode at a time.

After each episode the data set on disk is complete.

Each episode is a data file and a metadata file; both get their final names only when they are
complete. An episode counts as soon as `meta/info.json` includes it. A writer that is killed before
that loses the episode; the next writer continues after the last one that counts. Images are stored
without loss, as PNG in the data file.

Every feature has statistics: those of an episode (`stats/...`) and of the data set
(`meta/stats.json`).
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, Self

import msgspec
import numpy as np

from vla_rl.datasets.episode import RecordedEpisode
from vla_rl.datasets.lerobot import layout
from vla_rl.datasets.lerobot.layout import (
    CHUNKS_SIZE,
    DATA_PATH,
    EPISODES_FOLDER,
    EPISODES_PATH,
    INFO_FILE,
    OURS,
    STATS_FILE,
    TASKS_FILE,
    Feature,
    Info,
    name_camera,
    read_info,
)
from vla_rl.datasets.lerobot.reading import read_lerobot
from vla_rl.datasets.lerobot.tables import read_rows
from vla_rl.errors import DataError
from vla_rl.util.atomic_files import replace_file, replacing
from vla_rl.util.foreign_data import find_files, get_whole_number, reading
from vla_rl.util.imports import pa, pq


class Stats(msgspec.Struct, frozen=True):
    """Statistics of one feature: float64 arrays of its shape; of images [3, 1, 1] in [0, 1].

    Example:
        Of the gripper commands of 118 control steps:

        Stats(min=np.array([-1.0]), max=np.array([1.0]), mean=np.array([-0.2]), std=np.array([0.98]),
              count=118)
    """

    min: np.ndarray
    max: np.ndarray
    mean: np.ndarray
    std: np.ndarray
    count: int

    @classmethod
    def from_rows(cls, rows: np.ndarray) -> "Stats":
        """Compute the statistics over the first axis."""
        rows = rows.astype(np.float64)
        return cls(rows.min(0), rows.max(0), rows.mean(0), rows.std(0), len(rows))

    @classmethod
    def from_values(cls, values: Mapping[str, Any], location: str) -> "Stats":
        """Return the inverse of `values`. Raises: DataError if they are no statistics."""
        with reading(location, "statistics of one feature", "write the data set again"):
            low, high, mean, std = (
                np.asarray(values[name], np.float64) for name in ("min", "max", "mean", "std")
            )
            (count,) = values["count"]
            if len({low.shape, high.shape, mean.shape, std.shape}) > 1:
                raise ValueError(f"the shapes are {low.shape}, {high.shape} and {mean.shape}")
            number = get_whole_number({"count": count}, "count", location)
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
        # Weighted updates and no sums: sums of squares over a long data set lose the small spread
        # of large values.
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


def compute_stats(
    episode: RecordedEpisode, features: Mapping[str, Feature], table: "pa.Table"
) -> dict[str, Stats]:
    """Return the statistics of one episode, given its table."""
    readers = {name_camera(key): read for key, read in episode.frames.items()}
    found = {}
    for name, feature in features.items():
        if feature.dtype == "image":
            pixels = np.stack([readers[name](step) for step in range(episode.num_steps)]).reshape(
                -1, 3
            )
            found[name] = _compute_pixel_stats(pixels, episode.num_steps)
        else:
            found[name] = Stats.from_rows(
                np.array(table.column(name).to_pylist(), np.float64).reshape(len(table), -1)
            )
    return found


def read_stats(row: Mapping[str, Any], features: Iterable[str], path: Path) -> dict[str, Stats]:
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
        name: Stats.from_values(values, f"{path}: 'stats/{name}' of episode {episode}")
        for name, values in found.items()
    }


def merge_stats(one: Mapping[str, Stats], other: Mapping[str, Stats]) -> dict[str, Stats]:
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


def _compute_pixel_stats(pixels: np.ndarray, num_frames: int) -> Stats:
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


DEFAULT_FPS: Final = 20
"""Control steps a second of a new data set, by default."""


class LeRobotWriter:
    """Adds episodes to a LeRobotDataset.

    Use one writer a folder at a time; calls block, so run them in a thread.

    Args:
        root: the folder of the data set; created if it does not exist, extended if it holds a data
            set of the same features.
        fps: control steps a second; None: that of the folder, `DEFAULT_FPS` in a new one.
        robot_type: name of the robot; None: that of the folder, unknown in a new one.

    Raises: DataError if the folder holds other files, or a data set of another rate or robot.
    """

    def __init__(
        self, root: Path, *, fps: float | None = None, robot_type: str | None = None
    ) -> None:
        self._root, self._tasks, self._names = root, dict[str, int](), set[str]()
        self._stats: dict[str, Stats] = {}
        self._info = Info(
            codebase_version="v3.0",
            robot_type=robot_type,
            total_episodes=0,
            total_frames=0,
            fps=DEFAULT_FPS if fps is None else fps,
            data_path=DATA_PATH,
            features={},
        )
        info = check_can_add(root, fps=fps, robot_type=robot_type)
        # Everything is checked before anything is written: a folder of another program stays as it
        # is.
        if info is not None:
            self._continue(info)

    @property
    def names(self) -> frozenset[str]:
        """Return the names of the episodes in the data set."""
        return frozenset(self._names)

    def add_episode(self, episode: RecordedEpisode) -> Self:
        """Append one episode.

        Raises: DataError if its features are not those of the others, or its name is already used;
            OSError if it could not be written, as on a full disk: the episode does not count then,
            and others may still be added.
        """
        features = layout.describe_features(episode)
        if episode.name in self._names:
            raise DataError(f"{self._root} holds {episode.name!r} already.")
        if self._info.features and features != self._info.features:
            raise DataError(
                f"{episode.name} has the features {sorted(features)}, {self._root} has others or "
                "other shapes."
            )
        number = self._info.total_episodes
        tasks = {**self._tasks}
        task_of = [tasks.setdefault(words, len(tasks)) for words in episode.step_instructions]
        table = layout.make_episode_table(
            episode, features, number, self._info.total_frames, task_of, self._info.fps
        )
        stats = compute_stats(episode, features, table)
        path_values = {"chunk_index": number // CHUNKS_SIZE, "file_index": number % CHUNKS_SIZE}
        about = pa.Table.from_pylist([self._episode_row(episode, path_values, stats)])
        all_stats = merge_stats(self._stats, stats)
        # info.json last: until it counts the episode, a reader sees the data set as it was before
        try:
            _write_table(self._root / DATA_PATH.format(**path_values), table)
            _write_table(self._root / EPISODES_PATH.format(**path_values), about)
            info = self._count(episode, features, tasks, all_stats)
        except OSError:
            self._remove_uncounted(number)
            raise
        self._info, self._tasks, self._stats = info, tasks, all_stats
        self._names.add(episode.name)
        return self

    def _episode_row(
        self, episode: RecordedEpisode, path_values: dict[str, int], stats: dict[str, Stats]
    ) -> dict[str, Any]:
        """Return the row of `meta/episodes` for the next episode."""
        first_row = self._info.total_frames
        return {
            "episode_index": self._info.total_episodes,
            "tasks": list(dict.fromkeys(episode.step_instructions)),
            "length": episode.num_steps,
            "data/chunk_index": path_values["chunk_index"],
            "data/file_index": path_values["file_index"],
            "dataset_from_index": first_row,
            "dataset_to_index": first_row + episode.num_steps,
            "meta/episodes/chunk_index": path_values["chunk_index"],
            "meta/episodes/file_index": path_values["file_index"],
            **{
                f"stats/{name}/{kind}": value
                for name, stat in stats.items()
                for kind, value in stat.values().items()
            },
            **{
                f"{OURS}{key}": value
                for key, value in {"name": episode.name, **episode.about}.items()
            },
        }

    def _count(
        self,
        episode: RecordedEpisode,
        features: dict[str, Any],
        tasks: dict[str, int],
        stats: dict[str, Stats],
    ) -> Info:
        """Write the files that make the episode count; `info.json` last."""
        _write_table(self._root / TASKS_FILE, layout.make_tasks_table(tasks))
        values = {name: stat.values() for name, stat in stats.items()}
        replace_file(self._root / STATS_FILE, msgspec.json.format(msgspec.json.encode(values)))
        total = self._info.total_episodes + 1
        info = msgspec.structs.replace(
            self._info,
            total_episodes=total,
            total_frames=self._info.total_frames + episode.num_steps,
            total_tasks=len(tasks),
            splits={"train": f"0:{total}"},
            features=features,
        )
        replace_file(self._root / INFO_FILE, msgspec.json.format(msgspec.json.encode(info)))
        return info

    def _continue(self, info: Info) -> None:
        self._remove_uncounted(info.total_episodes)
        episodes = read_lerobot(self._root) if info.total_episodes else []
        self._info, self._names = info, {episode.name for episode in episodes}
        # In the order of the episodes, which gives the same numbers again as when they were
        # written.
        for words in (words for episode in episodes for words in episode.step_instructions):
            self._tasks.setdefault(words, len(self._tasks))
        if not episodes:
            return
        for path in find_files(self._root / EPISODES_FOLDER, "*/*.parquet"):
            for row in read_rows(path):  # stats.json may count an episode that info.json does not
                self._stats = merge_stats(self._stats, read_stats(row, info.features, path))

    def _remove_uncounted(self, num_episodes: int) -> None:
        """Remove files of episodes that do not count, which a killed writer or a full disk left."""
        for pattern in (DATA_PATH, EPISODES_PATH):
            path_values = {
                "chunk_index": num_episodes // CHUNKS_SIZE,
                "file_index": num_episodes % CHUNKS_SIZE,
            }
            (self._root / pattern.format(**path_values)).unlink(missing_ok=True)
        for part in self._root.rglob("*.part"):
            part.unlink()


def check_can_add(
    root: Path, *, fps: float | None = None, robot_type: str | None = None
) -> Info | None:
    """Return the description of the data set in `root` that a writer would extend.

    None for a new one. Writes nothing.

    Raises: DataError if the folder holds other files, or a data set of another rate or robot.
    """
    if not (root / INFO_FILE).is_file():
        if root.exists() and not root.is_dir():
            raise DataError(f"{root} is a file, expected a new folder or a data set.")
        if root.is_dir() and any(root.iterdir()):
            raise DataError(
                f"{root} holds other files and no {INFO_FILE}, expected a new folder or a data set."
            )
        return None
    info = read_info(root)
    for name, value in (("fps", fps), ("robot_type", robot_type)):
        if value is not None and value != getattr(info, name):
            raise DataError(
                f"{name} is {value!r}, {root / INFO_FILE} says {getattr(info, name)!r}, expected "
                "the same; write into another folder."
            )
    if (
        info.codebase_version != "v3.0"
        or info.data_path != DATA_PATH
        or info.video_path is not None
    ):
        raise DataError(
            f"{root} is a data set of another program, expected one that this writer can extend."
        )
    return info


def _write_table(path: Path, table: "pa.Table") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as part:
        pq.write_table(table, part, compression="snappy", write_page_checksum=True)
