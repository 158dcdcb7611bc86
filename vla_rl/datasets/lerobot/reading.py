"""Read a LeRobotDataset, v3.0 or v2.1: numbers at once, frames on demand.

The rows of the data files define the episodes; `meta/episodes` is needed for videos and for the
facts about episodes. All images of the observation are read, and all vectors of numbers, as
float32.
"""

import contextlib
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np

from vla_rl.datasets.episode import FrameReader, RecordedEpisode
from vla_rl.datasets.lerobot.frames import ImageColumns, Segment, Videos
from vla_rl.datasets.lerobot.layout import (
    INFO_FILE,
    INTERVENED,
    KNOWN_FIELDS,
    OBSERVED,
    REWARD,
    SUCCESS,
    Info,
    find_feature,
    find_training_episodes,
    format_path,
    get_observation_key,
    read_info,
    require_gripper_last,
)
from vla_rl.datasets.lerobot.tables import (
    DataFile,
    EpisodeRow,
    read_episodes,
    read_tasks,
    require_listed_tasks,
)
from vla_rl.errors import DataError
from vla_rl.util.foreign_data import find_files, get_number, get_whole_number

_log = logging.getLogger(__name__)


def read_lerobot(
    root: Path, *, fields: Mapping[str, str] | None = None, has_gripper: bool = True
) -> list[RecordedEpisode]:
    """Read all episodes of the data set in `root`, in order.

    Args:
        root: the folder of the data set, as it was downloaded or written.
        fields: names of the features of `image`, `wrist_image`, `state` or `action`, if they are
            not the usual ones.
        has_gripper: whether the last number of an action is a gripper command.

    Raises: DataError, naming the file and the field, and the row and episode if one is wrong.
    """
    return _Reader(root, dict(fields or {}), has_gripper).episodes()


class _Rows(msgspec.Struct, frozen=True):
    """The rows of one episode in a data file."""

    file: DataFile
    episode: int
    begin: int
    end: int

    def slice(self, values: np.ndarray) -> np.ndarray:
        """Return the episode's part of a column."""
        return values[self.begin : self.end]


class _Reader:
    """Reads one data set."""

    def __init__(self, root: Path, fields: Mapping[str, str], has_gripper: bool) -> None:
        # A misspelt key would be ignored, and the usual name be read instead.
        unknown = sorted(set(fields) - set(KNOWN_FIELDS))
        if unknown:
            raise DataError(f"fields name {unknown[0]!r}, expected some of {sorted(KNOWN_FIELDS)}.")
        self._root, self._info, self._asked_for = root, read_info(root), set(fields)
        self._features = {key: find_feature(self._info, root, key, fields) for key in KNOWN_FIELDS}
        if self._features["action"] is None:
            raise self._missing("action")
        if has_gripper:
            require_gripper_last(root / INFO_FILE, self._info.features[self._features["action"]])
        others = self._other_features()
        described = self._info.features
        self._vectors = {key: name for key, name in others.items() if described[name].is_vector}
        cameras = {key: name for key, name in others.items() if described[name].is_image}
        known = {key: name for key, name in self._features.items() if name is not None}
        _require_kinds(self._info, root, known)
        self._cameras = {
            key: name for key, name in known.items() if described[name].is_image
        } | cameras
        left_out = sorted(set(others) - set(self._vectors) - set(cameras))
        if left_out:
            _log.warning(
                "%s: only images and vectors of numbers are read; left out: %s",
                root,
                ", ".join(left_out),
            )
        for key, name in list(self._cameras.items()):
            if described[name].is_depth_map:
                self._leave_out(key, "meta/info.json says that it is a depth map")
        self._tasks = read_tasks(root, self._info)
        self._about = read_episodes(root, self._info)
        self._images, self._videos = ImageColumns(root), Videos(self._info.fps)

    def _leave_out(self, key: str, reason: str) -> None:
        """Leave a camera out that does not show colours of 8 bits, with a line.

        Raises: DataError if the caller named it.
        """
        name = self._cameras.pop(key)
        if key in self._asked_for:
            raise DataError(
                f"{self._root}: fields name {name!r} for {key!r}, but {reason}; expected a camera "
                "of 8 bits a channel."
            )
        _log.warning(
            "%s: the camera %r (%s) is left out: %s, expected 8 bits a channel",
            self._root,
            key,
            name,
            reason,
        )

    def _other_features(self) -> dict[str, str]:
        """Return the observed features beside the known ones, by the key that they get."""
        others: dict[str, str] = {}
        for name in self._info.features:
            key = get_observation_key(name)
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
        """Return every episode.

        Raises: DataError if rows are missing, or frames of a video.
        """
        paths = find_files(self._root / "data", "*/*.parquet")
        files = [DataFile(path, self._info.total_frames) for path in paths]
        files = [file for file in files if file.num_rows]
        for key, name in list(self._cameras.items()):
            if files and self._info.features[name].dtype == "image" and files[0].has(name):
                deep = self._images.deep_kind(files[0], name, 0)
                # Descriptions often lack this fact; 16 bits that are read as 8 would be noise.
                if deep is not None:
                    self._leave_out(key, f"its images are {deep}")
        found = [episode for file in files for episode in self._read_episodes(file)]
        found.sort(key=lambda numbered: numbered[0])
        numbers = [number for number, _ in found]
        expected = self._info.total_episodes
        # counted, not listed: a description may claim any number
        lost = next((n for n, number in enumerate(numbers) if number != n), len(numbers))
        if lost != expected or len(numbers) != expected:
            raise DataError(
                f"{self._root / INFO_FILE} lists {expected} episodes, the data files hold "
                f"{len(numbers)}; "
                + (
                    f"episode {lost} is the first that is missing."
                    if lost < expected and (lost == len(numbers) or numbers[lost] > lost)
                    else "some are in several files."
                )
            )
        # A download that stopped between two files leaves a data set that reads well and is half as
        # large.
        num_rows = sum(file.num_rows for file in files)
        if num_rows != self._info.total_frames:
            raise DataError(
                f"{self._root / INFO_FILE} lists {self._info.total_frames} frames, the data files "
                f"hold {num_rows}; download the folder again if it is incomplete."
            )
        self._videos.match()
        return self._leave_out_held_out(found)

    def _leave_out_held_out(
        self, found: Sequence[tuple[int, RecordedEpisode]]
    ) -> list[RecordedEpisode]:
        """Return the episodes of the split `train` alone, if there are others: what is held out is not learnt."""
        training = find_training_episodes(self._info)
        if training is None:
            return [episode for _, episode in found]
        kept = [episode for number, episode in found if number in training]
        others = sorted(set(self._info.splits) - {"train"})
        _log.warning(
            "%s has %s beside the split train, and is read without: %d of %d episodes; to read all, remove the "
            "other splits from %s.",
            self._root,
            ", ".join(others),
            len(kept),
            len(found),
            INFO_FILE,
        )
        return kept

    def _read_episodes(self, file: DataFile) -> list[tuple[int, RecordedEpisode]]:
        indices, frames = file.integers("episode_index"), file.integers("frame_index")
        # An episode is a run of rows with one number: v3.0 has several in a file, v2.1 one.
        begins = np.flatnonzero(np.diff(indices, prepend=indices[:1] - 1))
        ends = np.append(begins[1:], len(indices))
        columns = self._columns(file)
        tasks = file.integers("task_index")
        times = self._times(file)
        episodes = []
        for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
            wrong = np.flatnonzero(frames[begin:end] != np.arange(end - begin))
            if len(wrong):
                row = begin + int(wrong[0])
                raise DataError(
                    f"{file.path}: {file.describe_row(row)} is out of order, expected frame {row - begin}."
                )
            rows = _Rows(file, int(indices[begin]), begin, end)
            episodes.append(
                (rows.episode, self._episode(rows, columns, rows.slice(tasks), rows.slice(times)))
            )
        return episodes

    def _times(self, file: DataFile) -> np.ndarray:
        """Return the time of each row in its episode, float64 [rows], in s."""
        if self._has_videos and file.has("timestamp"):
            with contextlib.suppress(DataError):  # nothing else reads this column
                times = file.read_numbers("timestamp", 1)[:, 0].astype(np.float64)
                inside = np.diff(file.integers("frame_index")) > 0
                if (np.diff(times)[inside] > 0).all():
                    return times
        return file.integers("frame_index") / self._info.fps

    @property
    def _has_videos(self) -> bool:
        return any(self._info.features[name].dtype == "video" for name in self._cameras.values())

    def _columns(self, file: DataFile) -> dict[str, np.ndarray]:
        """Return action, vectors, reward and who intervened of all rows, by observation key."""
        columns = {}
        for key in ("action", "state"):
            feature = self._features[key]
            if feature is not None:
                columns[key] = file.read_numbers(feature, self._info.features[feature].shape[0])
        for key, feature in self._vectors.items():
            columns[key] = file.read_numbers(feature, self._info.features[feature].shape[0])
        for feature in (REWARD, SUCCESS, INTERVENED):
            if feature in self._info.features:
                columns[feature] = file.read_numbers(feature, 1)[:, 0]
        return columns

    def _episode(
        self,
        rows: _Rows,
        columns: Mapping[str, np.ndarray],
        tasks: np.ndarray,
        times: np.ndarray,
    ) -> RecordedEpisode:
        number, about = rows.episode, self._about.get(rows.episode)
        self._require_length(rows, about)
        words = self._words(rows, tasks.tolist(), about)
        ours = about.ours if about is not None else {}
        values = {key: rows.slice(column) for key, column in columns.items()}
        rewards, success = values.pop(REWARD, None), values.pop(SUCCESS, None)
        intervened = values.pop(INTERVENED, None)
        return RecordedEpisode(
            name=str(ours.pop("name", f"{self._root}: episode {number}")),
            instruction=words[0],
            instructions=tuple(words) if len(set(words)) > 1 else None,
            actions=values.pop("action"),
            vectors=values,
            frames={
                key: self._frames(key, feature, rows, about, times)
                for key, feature in self._cameras.items()
            },
            rewards=rewards,
            intervened=None if intervened is None else intervened != 0.0,
            is_success=None if success is None else bool(success[-1]),
            about=ours,
        )

    def _require_length(self, rows: _Rows, about: EpisodeRow | None) -> None:
        length = about.length if about is not None else None
        if about is not None and length is not None and length != rows.end - rows.begin:
            raise DataError(
                f"{rows.file.path} has {rows.end - rows.begin} rows of episode {rows.episode}, "
                f"{about.location} says 'length' {length}, expected the same; download the folder "
                "again if it is incomplete."
            )

    def _words(self, rows: _Rows, tasks: Sequence[int], about: EpisodeRow | None) -> list[str]:
        """Return the words of each row of an episode."""
        for step, task in enumerate(tasks):
            if task not in self._tasks:
                raise DataError(
                    f"{rows.file.path}: {rows.file.describe_row(rows.begin + step)} has task {task}, which "
                    "meta/tasks does not name."
                )
        words = [self._tasks[task] for task in tasks]
        require_listed_tasks(rows.episode, set(words), about)
        return words

    def _frames(
        self, key: str, feature: str, rows: _Rows, about: EpisodeRow | None, times: np.ndarray
    ) -> FrameReader:
        described, number = self._info.features[feature], rows.episode
        if described.dtype == "image":
            return lambda step: self._images.frame(rows.file, feature, described, rows.begin + step)
        if self._info.video_path is None:
            raise DataError(
                f"{self._root / INFO_FILE}: {feature!r} is a video, but there is no video_path."
            )
        row = about.row if about is not None else {}
        location = about.location if about is not None else ""
        chunk, file, from_timestamp = (
            f"videos/{feature}/{name}" for name in ("chunk_index", "file_index", "from_timestamp")
        )
        lost = [name for name in (chunk, file, from_timestamp) if name not in row]
        if lost and not self._info.is_v2:
            raise DataError(
                f"{self._root}: meta/episodes has no {lost[0]!r} for episode {number}, so the "
                "position of its video is unknown; download the folder again if it is incomplete."
            )
        values: dict[str, str | int] = {
            "video_key": feature,
            "episode_index": number,
            "episode_chunk": number // self._info.chunks_size,
            "chunk_index": get_whole_number(row, chunk, location) if chunk in row else 0,
            "file_index": get_whole_number(row, file, location) if file in row else 0,
        }
        path = format_path(self._info.video_path, self._root, values)
        is_needed = key in KNOWN_FIELDS  # frames of other features may never be read
        if is_needed and not path.is_file():
            raise DataError(f"{path} is missing, expected the frames {key!r} of episode {number}.")
        from_s = get_number(row, from_timestamp, location) if from_timestamp in row else 0.0
        segment = Segment(number, from_s, times)
        return self._videos.add_segment(path, feature, described, segment, is_needed=is_needed)

    def _missing(self, key: str) -> DataError:
        return DataError(
            f"{self._root / INFO_FILE} has no feature that is known as {key!r} "
            f"({', '.join(KNOWN_FIELDS[key])}); it has "
            f"{sorted(self._info.features)}; name the feature with fields = {{{key!r}: ...}}."
        )


def _require_kinds(info: Info, root: Path, known: Mapping[str, str]) -> None:
    """Raise DataError if a camera holds no images, or action or state no vector."""
    for key, name in known.items():
        found = info.features[name]
        if key in ("image", "wrist_image") and not found.is_image:
            raise DataError(
                f"{root / INFO_FILE}: {name!r} is of dtype {found.dtype!r}, expected image or video"
            )
        if key in ("action", "state") and not found.is_vector:
            raise DataError(
                f"{root / INFO_FILE}: {name!r} is {found.dtype} of shape {list(found.shape)}, "
                "expected a vector of numbers."
            )
