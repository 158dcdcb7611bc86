"""The layout of a LeRobotDataset: its folder, its description, an episode as its columns.

meta/info.json                                features, frames a second, path patterns, totals
meta/tasks.parquet                            (v2.1: tasks.jsonl) task_index and instruction
meta/episodes/chunk-000/file-000.parquet      (v2.1: episodes.jsonl) length and position of every
                                              episode
meta/stats.json                               statistics of every feature
data/chunk-000/file-000.parquet               (v2.1: one file an episode) a row for each frame
videos/<feature>/chunk-000/file-000.mp4       (v2.1: one file an episode) frames of features of
                                              dtype "video"

Columns have the metadata that `datasets` and `pandas` need. A feature of shape [1] is a column of
plain numbers, any other vector one of lists.
"""

import json
import re
import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import numpy as np

from vla_rl.datasets.episode import FrameReader, RecordedEpisode
from vla_rl.errors import DataError
from vla_rl.util.foreign_data import reading
from vla_rl.util.imports import pa
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
INTERVENED: Final = "intervened"
"""Whether an expert or a person chose the action of a row."""

OURS: Final = "vla_rl/"
"""Prefix of the columns that we add about episodes."""


class Feature(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One column of the data.

    Example:
        Feature(dtype="image", shape=(256, 256, 3), names=["height", "width", "channel"])
        Feature(dtype="float32", shape=(7,), names=["action"])
    """

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
    def is_image(self) -> bool:
        """Whether the feature holds images."""
        return self.dtype in ("image", "video")

    @property
    def is_vector(self) -> bool:
        """Whether the feature holds vectors of numbers."""
        return len(self.shape) == 1 and self.dtype.startswith(("float", "int", "uint", "bool"))

    @property
    def is_depth_map(self) -> bool:
        """Whether the description says that the images hold distances."""
        # Versions of LeRobot have written this at three places; a depth map that is read as colours
        # trains without an error.
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
        # The names first: a shape of (3, 3, 3) says nothing about its order.
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
    """The fields of `meta/info.json` that are needed.

    Example:
        50 recorded episodes of LIBERO-Goal:

        Info(codebase_version="v3.0", robot_type="panda", total_episodes=50, total_frames=6200, fps=20,
             total_tasks=10, splits={"train": "0:50"}, data_path=DATA_PATH, features={"action": ...})
    """

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


def format_path(pattern: str, root: Path, values: Mapping[str, str | int]) -> Path:
    """Return the file that a pattern of `meta/info.json` names.

    Raises: DataError for a placeholder that is not known, and for a file outside of `root`.
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
    # A description that was downloaded must not name files outside of its folder.
    if path.is_absolute() or ".." in path.parts or "\0" in str(path):
        raise DataError(f"{where} leads to {excerpt(str(path))}, {expected}.")
    return root / path


OBSERVED: Final = "observation."
CAMERAS: Final = "observation.images."


def get_observation_key(feature: str) -> str:
    """Return the observation key of a feature that is not one of the known fields."""
    return feature.removeprefix(CAMERAS).removeprefix(OBSERVED)


def find_feature(info: Info, root: Path, key: str, fields: Mapping[str, str]) -> str | None:
    """Return the feature that holds `key`; None if there is none.

    Raises: DataError if `fields` names a missing one, or there are several and it names none.
    """
    if key in fields:
        if fields[key] not in info.features:
            raise DataError(
                f"{root / INFO_FILE} has no feature {fields[key]!r}; it has "
                f"{sorted(info.features)}."
            )
        return fields[key]
    found = [name for name in KNOWN_FIELDS[key] if name in info.features]
    if len(found) > 1:
        raise DataError(
            f"{root / INFO_FILE} has {' and '.join(map(repr, found))}, which are both known as {key!r}; name "
            f"the one to read with fields = {{{key!r}: {found[0]!r}}} (--data.fields {key} {found[0]})."
        )
    return found[0] if found else None


def require_gripper_last(path: Path, feature: Feature) -> None:
    """Raise DataError if the names of an action's numbers put a gripper elsewhere than at their end."""
    names = feature.names
    if isinstance(names, dict) and len(names) == 1:
        (names,) = names.values()
    if not isinstance(names, list) or feature.shape != (len(names),):
        return
    grippers = [number for number, name in enumerate(names) if "gripper" in str(name).lower()]
    if grippers and grippers[-1] != len(names) - 1:
        raise DataError(
            f"{path}: number {grippers[-1]} of {len(names)} of an action is the gripper, {excerpt(names)}, expected "
            "the last one; write the data set anew in that order, or, if no number is to be read as a gripper "
            "command, use gripper = 'none' (--data.gripper none)."
        )


def find_training_episodes(info: Info) -> range | None:
    """Return the episodes of the split `train`, if there are others beside it; None for all."""
    first, _, end = info.splits.get("train", "").partition(":")
    if len(info.splits) < 2 or not (first.isdecimal() and end.isdecimal()):
        return None
    return range(int(first), int(end))


def encode_png(frame: np.ndarray) -> bytes:
    """Encode uint8 [H, W, 3], RGB, as PNG, without loss."""
    import cv2  # slow to import, needed only for images

    # PNG and not JPEG: a data set that is read, written and read again keeps every bit
    _, data = cv2.imencode(".png", np.ascontiguousarray(frame[..., ::-1]))
    return bytes(data)


def name_vector(key: str) -> str:
    """Return the name of an observation key in the data set."""
    return KNOWN_FIELDS[key][0] if key in KNOWN_FIELDS else f"{OBSERVED}{key}"


def name_camera(key: str) -> str:
    """Return the name of a camera in the data set."""
    return KNOWN_FIELDS[key][0] if key in KNOWN_FIELDS else f"{CAMERAS}{key}"


def describe_features(episode: RecordedEpisode) -> dict[str, Feature]:
    """Return the `features` of `meta/info.json`."""
    features = {}
    for key, read in episode.frames.items():
        shape = read(0).shape
        # The shape of the first frame holds for all; each is compared when it is written.
        features[name_camera(key)] = Feature(
            dtype="image", shape=shape, names=["height", "width", "channel"]
        )
    for key, values in episode.vectors.items():
        features[name_vector(key)] = Feature(dtype="float32", shape=values.shape[1:], names=[key])
    features["action"] = Feature(dtype="float32", shape=episode.actions.shape[1:], names=["action"])
    if episode.rewards is not None:
        features[REWARD] = Feature(dtype="float32", shape=(1,))
    if episode.intervened is not None:
        features[INTERVENED] = Feature(dtype="bool", shape=(1,))
    if episode.is_success is not None:
        features |= {
            DONE: Feature(dtype="bool", shape=(1,)),
            SUCCESS: Feature(dtype="bool", shape=(1,)),
        }
    features["timestamp"] = Feature(dtype="float32", shape=(1,))
    whole = ("frame_index", "episode_index", "index", "task_index")
    return features | {name: Feature(dtype="int64", shape=(1,)) for name in whole}


def make_episode_table(
    episode: RecordedEpisode,
    features: Mapping[str, Feature],
    number: int,
    first_row: int,
    task_of: Sequence[int],
    fps: float,
) -> "pa.Table":
    """Return a table with one row for each control step.

    Args:
        episode: the episode.
        features: as returned by `describe_features`.
        number, first_row: episodes and rows before this one.
        task_of: index of the instruction at each control step.
        fps: control steps a second.
    """
    steps = np.arange(episode.num_steps)
    is_last = steps == episode.num_steps - 1
    values: dict[str, Any] = {
        "action": episode.actions,
        "timestamp": (steps / fps).astype(np.float32),
        "frame_index": steps,
        "episode_index": np.full(len(steps), number),
        "index": first_row + steps,
        "task_index": np.array(task_of, np.int64),
        REWARD: episode.rewards,
        INTERVENED: episode.intervened,
        DONE: is_last,
        SUCCESS: is_last & bool(episode.is_success),
        **{name_vector(key): rows for key, rows in episode.vectors.items()},
    }
    frames = {name_camera(key): read for key, read in episode.frames.items()}
    image = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    arrays = []
    for name, feature in features.items():
        if feature.dtype == "image":
            arrays.append(
                pa.array(_encode_images(episode.name, frames[name], feature, len(steps)), image)
            )
        else:
            arrays.append(_make_number_column(np.asarray(values[name]), feature))
    table = pa.Table.from_arrays(arrays, names=list(features))
    described = {name: _describe_for_datasets(feature) for name, feature in features.items()}
    note = {"info": {"features": described}}
    return table.replace_schema_metadata({"huggingface": json.dumps(note)})


def _encode_images(
    episode: str, read: FrameReader, feature: Feature, num_steps: int
) -> list[dict[str, bytes | None]]:
    """Return the images of a camera. Raises: DataError for one of another size than the first."""
    encoded: list[dict[str, bytes | None]] = []
    for step in range(num_steps):
        frame = read(step)
        if frame.dtype != np.uint8 or frame.shape != feature.shape:
            raise DataError(
                f"{episode}: the image of control step {step} is {frame.dtype} of shape "
                f"{list(frame.shape)}, expected uint8 {list(feature.shape)} like the first."
            )
        encoded.append({"bytes": encode_png(frame), "path": None})
    return encoded


def make_tasks_table(tasks: Mapping[str, int]) -> "pa.Table":
    """Return `meta/tasks.parquet`: instructions are the index of a pandas data frame."""
    table = pa.table({"task_index": list(tasks.values()), "task": list(tasks)})
    # pandas reads the index from this note alone; without it, the words would be a column, which
    # LeRobot does not look for.
    text = {"pandas_type": "unicode", "numpy_type": "object", "metadata": None}
    number = {"pandas_type": "int64", "numpy_type": "int64", "metadata": None}
    note = {
        "index_columns": ["task"],
        "column_indexes": [
            {"name": None, "field_name": None, **text, "metadata": {"encoding": "UTF-8"}}
        ],
        "columns": [
            {"name": "task_index", "field_name": "task_index", **number},
            {"name": "task", "field_name": "task", **text},
        ],
        "creator": {"library": "pyarrow", "version": pa.__version__},
        "pandas_version": "2.0.0",
    }
    return table.replace_schema_metadata({"pandas": json.dumps(note)})


def _make_number_column(values: np.ndarray, feature: Feature) -> "pa.Array":
    kind = pa.type_for_alias(feature.dtype)
    if feature.shape == (1,):
        return pa.array(values.reshape(-1), kind)
    return pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1), kind), values.shape[1])


def _describe_for_datasets(feature: Feature) -> dict[str, Any]:
    if feature.dtype == "image":
        return {"_type": "Image"}
    value = {"dtype": feature.dtype, "_type": "Value"}
    return (
        value
        if feature.shape == (1,)
        else {"feature": value, "length": feature.shape[0], "_type": "Sequence"}
    )
