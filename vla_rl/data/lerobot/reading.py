"""Read a LeRobotDataset, v3.0 or v2.1: numbers at once, frames on demand.

The rows of the data files define the episodes; `meta/episodes` is needed for videos and for the
facts about episodes. All images of the observation are read, and all vectors of numbers, as
float32.
"""

import logging
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from vla_rl.data.episode import FrameReader, RecordedEpisode
from vla_rl.data.lerobot.frames import ImageColumns, Videos
from vla_rl.data.lerobot.layout import (
    EPISODES_FOLDER,
    INFO_FILE,
    KNOWN_FIELDS,
    OBSERVED,
    OURS,
    REWARD,
    SUCCESS,
    TASKS_FILE,
    TASKS_FILE_V2,
    Info,
    feature_of,
    key_of,
    read_info,
)
from vla_rl.data.lerobot.tables import DataFile, read_rows
from vla_rl.errors import DataError

_log = logging.getLogger(__name__)


def read_lerobot(root: Path, *, fields: Mapping[str, str] | None = None) -> list[RecordedEpisode]:
    """Read all episodes of the data set in `root`, in order.

    Args:
        root: the folder of the data set, as it was downloaded or written.
        fields: names of the features of `image`, `wrist_image`, `state` or `action`, if they are
            not the usual ones.

    Raises: DataError, naming the file and the field, and the row and episode if one is wrong.
    """
    return _Reader(root, dict(fields or {})).episodes()


class _Reader:
    """Reads one data set."""

    def __init__(self, root: Path, fields: Mapping[str, str]) -> None:
        unknown = sorted(set(fields) - set(KNOWN_FIELDS))
        if unknown:
            raise DataError(f"fields name {unknown[0]!r}, expected some of {sorted(KNOWN_FIELDS)}.")
        self._root, self._info = root, read_info(root)
        self._features = {key: feature_of(self._info, root, key, fields) for key in KNOWN_FIELDS}
        if self._features["action"] is None:
            raise self._missing("action")
        others = self._other_features()
        described = self._info.features
        self._vectors = {key: name for key, name in others.items() if described[name].is_vector}
        pictures = {key: name for key, name in others.items() if described[name].is_picture}
        known = {key: name for key, name in self._features.items() if name is not None}
        _require_kinds(self._info, root, known)
        self._pictures = {
            key: name for key, name in known.items() if described[name].is_picture
        } | pictures
        left_out = sorted(set(others) - set(self._vectors) - set(pictures))
        if left_out:
            _log.warning(
                "%s: only images and vectors of numbers are read; left out: %s",
                root,
                ", ".join(left_out),
            )
        self._tasks = _read_tasks(root, self._info)
        self._about = _read_episodes(root, self._info)
        self._images, self._videos = ImageColumns(root), Videos()

    def _other_features(self) -> dict[str, str]:
        """Return the observed features beside the known ones, by the key that they get."""
        others: dict[str, str] = {}
        for name in self._info.features:
            key = key_of(name)
            if (
                not name.startswith(OBSERVED)
                or name in self._features.values()
                or key in KNOWN_FIELDS
            ):
                continue
            if key in others:
                raise DataError(
                    f"{self._root / INFO_FILE}: {others[key]!r} and {name!r} would both be named "
                    f"{key!r}; expected different names."
                )
            others[key] = name
        return others

    def episodes(self) -> list[RecordedEpisode]:
        """Return every episode. Raises: DataError if rows are missing."""
        paths = sorted((self._root / "data").glob("*/*.parquet"))
        found = [episode for path in paths for episode in self._episodes_of(DataFile(path))]
        found.sort(key=lambda numbered: numbered[0])
        numbers = [number for number, _ in found]
        if numbers != list(range(self._info.total_episodes)):
            lost = sorted(set(range(self._info.total_episodes)) - set(numbers))
            raise DataError(
                f"{self._root / INFO_FILE} lists {self._info.total_episodes} episodes, the data "
                f"files hold {len(numbers)}; "
                + (
                    f"episode {lost[0]} is the first that is missing."
                    if lost
                    else "some are in several files."
                )
            )
        return [episode for _, episode in found]

    def _episodes_of(self, file: DataFile) -> list[tuple[int, RecordedEpisode]]:
        indices, frames = file.integers("episode_index"), file.integers("frame_index")
        begins = (
            np.flatnonzero(np.diff(indices, prepend=indices[:1] - 1))
            if len(indices)
            else np.array([], np.int64)
        )
        ends = np.append(begins[1:], len(indices))
        columns = self._columns(file)
        tasks = file.integers("task_index")
        episodes = []
        for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
            wrong = np.flatnonzero(frames[begin:end] != np.arange(end - begin))
            if len(wrong):
                row = begin + int(wrong[0])
                raise DataError(
                    f"{file.path}: {file.place(row)} is out of order, expected frame {row - begin}."
                )
            number = int(indices[begin])
            episodes.append(
                (number, self._episode(file, number, begin, end, columns, int(tasks[begin])))
            )
        return episodes

    def _columns(self, file: DataFile) -> dict[str, np.ndarray]:
        """Return action, vectors and reward of all rows, by observation key."""
        columns = {}
        for key in ("action", "state"):
            feature = self._features[key]
            if feature is not None:
                columns[key] = file.numbers(feature, self._info.features[feature].shape[0])
        for key, feature in self._vectors.items():
            columns[key] = file.numbers(feature, self._info.features[feature].shape[0])
        for feature in (REWARD, SUCCESS):
            if feature in self._info.features:
                columns[feature] = file.numbers(feature, 1)[:, 0]
        return columns

    def _episode(
        self,
        file: DataFile,
        number: int,
        begin: int,
        end: int,
        columns: Mapping[str, np.ndarray],
        task: int,
    ) -> RecordedEpisode:
        if task not in self._tasks:
            raise DataError(
                f"{file.path}: {file.place(begin)} has task {task}, which meta/tasks does not name."
            )
        about = self._about.get(number, {})
        ours = {
            key.removeprefix(OURS): value for key, value in about.items() if key.startswith(OURS)
        }
        rows = {key: values[begin:end] for key, values in columns.items()}
        rewards, success = rows.pop(REWARD, None), rows.pop(SUCCESS, None)
        return RecordedEpisode(
            name=str(ours.pop("name", f"{self._root}: episode {number}")),
            instruction=self._tasks[task],
            actions=rows.pop("action"),
            vectors=rows,
            frames={
                key: self._frames(key, feature, file, begin, end, about)
                for key, feature in self._pictures.items()
            },
            rewards=rewards,
            is_success=None if success is None else bool(success[-1]),
            about=ours,
        )

    def _frames(
        self, key: str, feature: str, file: DataFile, begin: int, end: int, about: Mapping[str, Any]
    ) -> FrameReader:
        if self._info.features[feature].dtype == "image":
            return lambda step: self._images.frame(file, feature, begin + step)
        if self._info.video_path is None:
            raise DataError(
                f"{self._root / INFO_FILE}: {feature!r} is a video, but there is no video_path."
            )
        number = int(file.integers("episode_index")[begin])
        known = [
            f"videos/{feature}/{name}" for name in ("chunk_index", "file_index", "from_timestamp")
        ]
        if not self._info.is_v2 and (lost := [name for name in known if name not in about]):
            raise DataError(
                f"{self._root}: meta/episodes has no {lost[0]!r} for episode {number}, so the "
                "position of its video is unknown; download the folder again if it is incomplete."
            )
        place = {
            "video_key": feature,
            "episode_index": number,
            "episode_chunk": number // self._info.chunks_size,
            "chunk_index": about.get(f"videos/{feature}/chunk_index", 0),
            "file_index": about.get(f"videos/{feature}/file_index", 0),
        }
        path = self._root / self._info.video_path.format(**place)
        if key in KNOWN_FIELDS and not path.is_file():  # frames of other features may never be read
            raise DataError(f"{path} is missing, expected the frames {key!r} of episode {number}.")
        from_s = float(about.get(f"videos/{feature}/from_timestamp", 0.0))
        shape = self._info.features[feature].shape
        return partial(self._videos.frame, path, from_s, end - begin, self._info.fps, shape)

    def _missing(self, key: str) -> DataError:
        return DataError(
            f"{self._root / INFO_FILE} has no feature that is known as {key!r} "
            f"({', '.join(KNOWN_FIELDS[key])}); it has "
            f"{sorted(self._info.features)}; name the feature with fields = {{{key!r}: ...}}."
        )


def _require_kinds(info: Info, root: Path, known: Mapping[str, str]) -> None:
    """Raise DataError if a camera is no picture, or action or state no vector."""
    for key, name in known.items():
        found = info.features[name]
        if key in ("image", "wrist_image") and not found.is_picture:
            raise DataError(
                f"{root / INFO_FILE}: {name!r} is of dtype {found.dtype!r}, expected image or video"
            )
        if key in ("action", "state") and not found.is_vector:
            raise DataError(
                f"{root / INFO_FILE}: {name!r} is {found.dtype} of shape {list(found.shape)}, "
                "expected a vector of numbers."
            )


def _read_tasks(root: Path, info: Info) -> dict[int, str]:
    if info.is_v2:
        return {
            int(row["task_index"]): str(row["task"]) for row in _read_lines(root / TASKS_FILE_V2)
        }
    rows = read_rows([root / TASKS_FILE])
    texts = [
        next((key for key, value in row.items() if isinstance(value, str)), None) for row in rows
    ]
    if any(text is None or "task_index" not in row for text, row in zip(texts, rows, strict=True)):
        raise DataError(
            f"{root / TASKS_FILE} has no task_index with a text beside it; it has "
            f"{sorted(rows[0])}."
        )
    return {
        int(row["task_index"]): str(row[text])
        for text, row in zip(texts, rows, strict=True)
        if text is not None
    }


def _read_episodes(root: Path, info: Info) -> dict[int, dict[str, Any]]:
    if info.is_v2:
        rows = _read_lines(root / "meta" / "episodes.jsonl")
    else:
        rows = read_rows(sorted((root / EPISODES_FOLDER).glob("*/*.parquet")))
    return {
        int(row["episode_index"]): {
            key: value
            for key, value in row.items()
            if not key.startswith("stats/") and value is not None
        }
        for row in rows
    }


def _read_lines(path: Path) -> list[dict[str, Any]]:
    try:
        return [
            msgspec.json.decode(line, type=dict[str, Any])
            for line in path.read_bytes().splitlines()
            if line
        ]
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # not JSON, or not UTF-8
        raise DataError(
            f"{path} is not lines of JSON in UTF-8: {error}; download or convert the data set "
            "again."
        ) from error
