"""An episode as the columns of a LeRobotDataset v3.0.

They have the metadata that `datasets` and `pandas` need.

A feature of shape [1] is a column of plain numbers, any other vector one of lists.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vla_rl.datasets.arrow import pa
from vla_rl.datasets.episode import FrameReader, RecordedEpisode
from vla_rl.datasets.lerobot.frames import encode_png
from vla_rl.datasets.lerobot.layout import (
    CAMERAS,
    DONE,
    KNOWN_FIELDS,
    OBSERVED,
    REWARD,
    SUCCESS,
    Feature,
)
from vla_rl.errors import DataError


def feature_name(key: str) -> str:
    """Return the name of an observation key in the data set."""
    return KNOWN_FIELDS[key][0] if key in KNOWN_FIELDS else f"{OBSERVED}{key}"


def picture_name(key: str) -> str:
    """Return the name of a camera in the data set."""
    return KNOWN_FIELDS[key][0] if key in KNOWN_FIELDS else f"{CAMERAS}{key}"


def features_of(episode: RecordedEpisode) -> dict[str, Feature]:
    """Return the `features` of `meta/info.json`."""
    features = {}
    for key, read in episode.frames.items():
        shape = read(0).shape
        features[picture_name(key)] = Feature(
            dtype="image", shape=shape, names=["height", "width", "channel"]
        )
    for key, values in episode.vectors.items():
        features[feature_name(key)] = Feature(dtype="float32", shape=values.shape[1:], names=[key])
    features["action"] = Feature(dtype="float32", shape=episode.actions.shape[1:], names=["action"])
    if episode.rewards is not None:
        features[REWARD] = Feature(dtype="float32", shape=(1,))
    if episode.is_success is not None:
        features |= {
            DONE: Feature(dtype="bool", shape=(1,)),
            SUCCESS: Feature(dtype="bool", shape=(1,)),
        }
    features["timestamp"] = Feature(dtype="float32", shape=(1,))
    whole = ("frame_index", "episode_index", "index", "task_index")
    return features | {name: Feature(dtype="int64", shape=(1,)) for name in whole}


def table_of(
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
        features: as returned by `features_of`.
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
        DONE: is_last,
        SUCCESS: is_last & bool(episode.is_success),
        **{feature_name(key): rows for key, rows in episode.vectors.items()},
    }
    frames = {picture_name(key): read for key, read in episode.frames.items()}
    image = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    arrays = []
    for name, feature in features.items():
        if feature.dtype == "image":
            arrays.append(
                pa.array(_encoded(episode.name, frames[name], feature, len(steps)), image)
            )
        else:
            arrays.append(_numbers(np.asarray(values[name]), feature))
    table = pa.Table.from_arrays(arrays, names=list(features))
    note = {"info": {"features": {name: _note(feature) for name, feature in features.items()}}}
    return table.replace_schema_metadata({"huggingface": json.dumps(note)})


def _encoded(
    episode: str, read: FrameReader, feature: Feature, num_steps: int
) -> list[dict[str, bytes | None]]:
    """Return the images of a camera. Raises: DataError for one of another size than the first."""
    encoded: list[dict[str, bytes | None]] = []
    for step in range(num_steps):
        frame = read(step)
        if frame.dtype != np.uint8 or frame.shape != feature.shape:
            raise DataError(
                f"{episode}: the picture of control step {step} is {frame.dtype} of shape "
                f"{list(frame.shape)}, expected uint8 {list(feature.shape)} like the first."
            )
        encoded.append({"bytes": encode_png(frame), "path": None})
    return encoded


def tasks_table(tasks: Mapping[str, int]) -> "pa.Table":
    """Return `meta/tasks.parquet`: instructions are the index of a pandas data frame."""
    table = pa.table({"task_index": list(tasks.values()), "task": list(tasks)})
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


def _numbers(values: np.ndarray, feature: Feature) -> "pa.Array":
    kind = pa.type_for_alias(feature.dtype)
    if feature.shape == (1,):
        return pa.array(values.reshape(-1), kind)
    return pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1), kind), values.shape[1])


def _note(feature: Feature) -> dict[str, Any]:
    if feature.dtype == "image":
        return {"_type": "Image"}
    value = {"dtype": feature.dtype, "_type": "Value"}
    return (
        value
        if feature.shape == (1,)
        else {"feature": value, "length": feature.shape[0], "_type": "Sequence"}
    )
