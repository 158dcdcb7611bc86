"""Where things are in a LeRobotDataset, and what its `meta/info.json` says.

meta/info.json                                features, frames a second, path patterns, totals
meta/tasks.parquet                            (v2.1: tasks.jsonl) task_index and instruction
meta/episodes/chunk-000/file-000.parquet      (v2.1: episodes.jsonl) length and place of every episode
meta/stats.json                               of every feature
data/chunk-000/file-000.parquet               (v2.1: one file an episode) a row for each frame
videos/<feature>/chunk-000/file-000.mp4       (v2.1: one file an episode) frames of features of dtype "video"
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
"""What published LIBERO data sets call our observation keys; the first is what we write."""

REWARD, DONE, SUCCESS = "next.reward", "next.done", "next.success"
OURS: Final = "vla_rl/"
"""Prefix of the columns about episodes that we add."""


class Feature(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One column of the data."""

    dtype: str
    """image, video, or a number's type."""

    shape: tuple[int, ...]
    names: Any = None

    @property
    def is_picture(self) -> bool:
        """Whether its frames are pictures."""
        return self.dtype in ("image", "video")

    @property
    def is_vector(self) -> bool:
        """Whether its frames are vectors of numbers."""
        return len(self.shape) == 1 and self.dtype.startswith(("float", "int", "uint", "bool"))


class Info(msgspec.Struct, kw_only=True):
    """`meta/info.json`, as far as it is needed."""

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
        """One file an episode, and lists of tasks and episodes as lines of JSON."""
        return self.codebase_version.startswith("v2.")


def read_info(root: Path) -> Info:
    """Read `meta/info.json`. Raises: DataError where it is none, or of a version that is not read here."""
    path = root / INFO_FILE
    try:
        info = msgspec.json.decode(path.read_bytes(), type=Info)
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}); expected a LeRobotDataset's folder.") from error
    except (ValueError, RecursionError) as error:  # no JSON of that kind, or bytes that are no text
        raise DataError(
            f"{path} is not a LeRobotDataset's description in UTF-8: {error}; download or convert the data set again."
        ) from error
    if not info.codebase_version.startswith(("v3.", "v2.")):
        raise DataError(f"{path}: codebase_version is {info.codebase_version!r}, expected v3.0 or v2.1.")
    return info


OBSERVED: Final = "observation."
CAMERAS: Final = "observation.images."


def key_of(feature: str) -> str:
    """What a feature of the observation without a name of its own is called here."""
    return feature.removeprefix(CAMERAS).removeprefix(OBSERVED)


def feature_of(info: Info, root: Path, key: str, fields: Mapping[str, str]) -> str | None:
    """The feature that holds `key`; None where the data set has none. Raises: DataError where `fields` names none."""
    if key in fields:
        if fields[key] not in info.features:
            raise DataError(f"{root / INFO_FILE} has no feature {fields[key]!r}; it has {sorted(info.features)}.")
        return fields[key]
    return next((name for name in KNOWN_FIELDS[key] if name in info.features), None)
