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

import re
import string
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec

from vla_rl.errors import DataError
from vla_rl.util.foreign_data import reading
from vla_rl.util.values import excerpt

INFO_FILE: Final = Path("meta/info.json")
STATS_FILE: Final = Path("meta/stats.json")
TASKS_FILE: Final = Path("meta/tasks.parquet")
TASKS_FILE_V2: Final = Path("meta/tasks.jsonl")
EPISODES_FILE_V2: Final = Path("meta/episodes.jsonl")
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

CHANNELS: Final = (1, 3, 4)
"""Sizes of the axis of an image that holds its colours."""

DEPTH_FORMATS: Final = ("gray9", "gray10", "gray12", "gray14", "gray16", "grayf")
"""ffmpeg's formats of pixels with one number of more than eight bits."""

REWARD, DONE, SUCCESS = "next.reward", "next.done", "next.success"
OURS: Final = "vla_rl/"
"""Prefix of the columns that we add about episodes."""


class Feature(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One column of the data."""

    dtype: str
    """`image`, `video`, or a type of number."""

    shape: tuple[Annotated[int, msgspec.Meta(ge=0)], ...]
    names: Any = None
    """Names of the axes of an image, such as height, width, channel; of others anything."""

    info: Any = None
    """Facts about a video or image, such as `is_depth_map`."""

    video_info: Any = None
    """The same in data sets of v2.0."""

    @property
    def is_picture(self) -> bool:
        """Whether the feature holds images."""
        return self.dtype in ("image", "video")

    @property
    def is_vector(self) -> bool:
        """Whether the feature holds vectors of numbers."""
        return len(self.shape) == 1 and self.dtype.startswith(("float", "int", "uint", "bool"))

    @property
    def is_depth_map(self) -> bool:
        """Whether the description says that the images hold distances."""
        for about in (self.info, self.video_info):
            if isinstance(about, dict):
                if about.get("is_depth_map") is True or about.get("video.is_depth_map") is True:
                    return True
                if str(about.get("video.pix_fmt", "")).startswith(DEPTH_FORMATS):
                    return True
        return False

    @property
    def height_and_width(self) -> tuple[int, int] | None:
        """Return the size of the images; None if the description does not tell."""
        shape, names = self.shape, self.names
        if isinstance(names, list) and len(names) == len(shape):
            axes = {str(name).lower()[:1]: size for name, size in zip(names, shape, strict=True)}
            if len(axes) == len(shape) and {"h", "w"} <= axes.keys():
                return axes["h"], axes["w"]
        if len(shape) == 3 and shape[2] in CHANNELS:
            return shape[0], shape[1]
        if len(shape) == 3 and shape[0] in CHANNELS:
            return shape[1], shape[2]
        return (shape[0], shape[1]) if len(shape) == 2 else None


class Info(msgspec.Struct, kw_only=True):
    """The fields of `meta/info.json` that are needed."""

    codebase_version: str
    robot_type: str | None = None
    total_episodes: Annotated[int, msgspec.Meta(ge=0)]
    total_frames: Annotated[int, msgspec.Meta(ge=0)]
    total_tasks: int = 0
    chunks_size: Annotated[int, msgspec.Meta(ge=1)] = CHUNKS_SIZE
    data_files_size_in_mb: float = 100
    video_files_size_in_mb: float = 200
    fps: Annotated[float, msgspec.Meta(ge=1e-3, le=1e6)]
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
    expected = "a LeRobotDataset's description in UTF-8"
    with reading(path, expected, "download or convert the data set again"):
        info = msgspec.json.decode(path.read_bytes(), type=Info)
    if not info.codebase_version.startswith(("v3.", "v2.")):
        raise DataError(
            f"{path}: codebase_version is {info.codebase_version!r}, expected v3.0 or v2.1."
        )
    return info


_PLAIN_FORMAT: Final = re.compile(r"(0?[1-9]?d)?")


def file_of(pattern: str, root: Path, values: Mapping[str, str | int]) -> Path:
    """Return the file that a pattern of `meta/info.json` names.

    Raises: DataError for a place holder that is not known, and for a file outside of `root`.
    """
    expected = f"expected a path below the folder, with some of {sorted(values)} in braces"
    where = f"{root / INFO_FILE}: the path {excerpt(pattern)}"
    with reading(where, "a pattern", expected):
        for _, name, layout, conversion in string.Formatter().parse(pattern):
            if name is None:
                continue
            if name not in values:
                raise DataError(f"{where} names {{{name}}}, {expected}.")
            if conversion or not _PLAIN_FORMAT.fullmatch(layout or ""):
                raise DataError(f"{where} formats {{{name}}} with {excerpt(layout)}, {expected}.")
        path = Path(pattern.format(**values))
    if path.is_absolute() or ".." in path.parts or "\0" in str(path):
        raise DataError(f"{where} leads to {excerpt(str(path))}, {expected}.")
    return root / path


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
