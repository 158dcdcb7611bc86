"""The layout of a LeRobotDataset, and its description in `meta/info.json`.

meta/info.json                                features, frames a second, path patterns, totals
meta/tasks.parquet                            (v2.1: tasks.jsonl) task_index and instruction
meta/episodes/chunk-000/file-000.parquet      (v2.1: episodes.jsonl) length and position of every
                                              episode
meta/stats.json                               statistics of every feature
data/chunk-000/file-000.parquet               (v2.1: one file an episode) a row for each frame
videos/<feature>/chunk-000/file-000.mp4       (v2.1: one file an episode) frames of features of
                                              dtype "video"
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from vla_rl.errors import DataError

INFO_FILE: Final = Path("meta/info.json")
STATS_FILE: Final = Path("meta/stats.json")
TASKS_FILE: Final = Path("meta/tasks.parquet")
TASKS_FILE_V2: Final = Path("meta/tasks.jsonl")
EPISODES_FOLDER: Final = Path("meta/episodes")
DATA_PATH: Final = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
EPISODES_PATH: Final = "meta/episodes/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
CHUNKS_SIZE: Final = 1000
"""Most files in one folder `chunk-NNN`."""

KNOWN_FIELDS: Final[Mapping[str, tuple[str, ...]]] = {
    "image": ("observation.images.image", "image"),
    "wrist_image": ("observation.images.wrist_image", "observation.images.image2", "wrist_image"),
    "state": ("observation.state", "state"),
    "action": ("action", "actions"),
}
"""Names of our observation keys in published LIBERO data sets; the first is the one that we
write."""

REWARD, DONE, SUCCESS = "next.reward", "next.done", "next.success"
OURS: Final = "vla_rl/"
"""Prefix of the columns that we add about episodes."""


class Feature(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One column of the data."""

    dtype: str
    """`image`, `video`, or a type of number."""

    shape: tuple[int, ...]
    names: Any = None

    @property
    def is_picture(self) -> bool:
        """Whether the feature holds images."""
        return self.dtype in ("image", "video")

    @property
    def is_vector(self) -> bool:
        """Whether the feature holds vectors of numbers."""
        return len(self.shape) == 1 and self.dtype.startswith(("float", "int", "uint", "bool"))


class Info(msgspec.Struct, kw_only=True):
    """The fields of `meta/info.json` that are needed."""

    codebase_version: str
    robot_type: str | None = None
    total_episodes: int
    total_frames: int
    total_tasks: int = 0
    chunks_size: int = CHUNKS_SIZE
    data_files_size_in_mb: float = 100
    video_files_size_in_mb: float = 200
    fps: float
    splits: dict[str, str] = {}
    data_path: str
    video_path: str | None = None
    features: dict[str, Feature]

    @property
    def is_v2(self) -> bool:
        """Whether the layout is v2.1.

        It has one file an episode, and the lists of tasks and episodes as JSON lines.
        """
        return self.codebase_version.startswith("v2.")


def read_info(root: Path) -> Info:
    """Read `meta/info.json`.

    Raises: DataError if it cannot be read or its version is not supported.
    """
    path = root / INFO_FILE
    try:
        info = msgspec.json.decode(path.read_bytes(), type=Info)
    except OSError as error:
        raise DataError(
            f"{path} cannot be read ({error.strerror}); expected a LeRobotDataset's folder."
        ) from error
    except (ValueError, RecursionError) as error:  # not JSON of that kind, or not UTF-8
        raise DataError(
            f"{path} is not a LeRobotDataset's description in UTF-8: {error}; download or convert "
            "the data set again."
        ) from error
    if not info.codebase_version.startswith(("v3.", "v2.")):
        raise DataError(
            f"{path}: codebase_version is {info.codebase_version!r}, expected v3.0 or v2.1."
        )
    return info


OBSERVED: Final = "observation."
CAMERAS: Final = "observation.images."


def key_of(feature: str) -> str:
    """Return the observation key of a feature that is not one of the known fields."""
    return feature.removeprefix(CAMERAS).removeprefix(OBSERVED)


def feature_of(info: Info, root: Path, key: str, fields: Mapping[str, str]) -> str | None:
    """Return the feature that holds `key`; None if there is none.

    Raises: DataError if `fields` names a missing one.
    """
    if key in fields:
        if fields[key] not in info.features:
            raise DataError(
                f"{root / INFO_FILE} has no feature {fields[key]!r}; it has "
                f"{sorted(info.features)}."
            )
        return fields[key]
    return next((name for name in KNOWN_FIELDS[key] if name in info.features), None)
