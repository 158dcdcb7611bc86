"""LIBERO's demonstrations as its authors publish them: one HDF5 file a task.

It has `data/demo_0`, `data/demo_1` and so on.

    actions                    [T, 7], in the environment's units: gripper +1 closes, -1 opens
    rewards                    [T], of each action
    obs/agentview_rgb          uint8 [T, 128, 128, 3], upside down and mirrored: rotated by 180 degrees here
    obs/eye_in_hand_rgb        the same for the camera in the hand
    obs/ee_pos, ee_ori         [T, 3] each, position (m) and axis times angle (rad)
    obs/gripper_states         [T, 2], finger joints (m)

LIBERO's tools wrote each observation after the action of its own row. So the action of row t is
paired with the observation of row t - 1, and the first action, which has no observation before it,
is left out. These files are recognised by attributes of `data`. OpenVLA's tools, which replay the
demonstrations, write the same fields without attributes, and each observation before its action.

Idle steps, in which the demonstrator paused, are left out as in OpenVLA's data: an action is idle
if its first six numbers have a norm below 1e-4 and its gripper command is that of the last step
kept. (OpenVLA's authors also replayed the remaining steps at 256 pixels and dropped the
demonstrations that then failed; the frames here are those of the file.)
"""

import logging
import math
import re
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from vla_rl.datasets.episode import RecordedEpisode, require_images, require_numbers
from vla_rl.errors import DataError
from vla_rl.util.foreign_data import reading
from vla_rl.util.values import excerpt

_log = logging.getLogger(__name__)

FIELDS: Final = ("actions", "obs/agentview_rgb", "obs/ee_pos", "obs/ee_ori", "obs/gripper_states")
LIBERO_ATTRIBUTES: Final = ("problem_info", "env_args", "bddl_file_name")
"""Attributes of `data` of which LIBERO's own tools write one or more."""

CAMERAS: Final = {"image": "obs/agentview_rgb", "wrist_image": "obs/eye_in_hand_rgb"}
IDLE_NORM: Final = 1e-4

WHOLE_FILE: Final = "a whole HDF5 file"
DOWNLOAD_AGAIN: Final = "download it again"
MOST_COMPRESSED: Final = 1100
"""Bytes that a byte of a file can hold at most, as gzip compresses, rounded up."""

_SCENE_PREFIX = re.compile(r"^[A-Z_]+_SCENE\d+_")
_SUFFIX = re.compile(r"_demo$")


class _ProblemInfo(msgspec.Struct):
    """The field of LIBERO's `problem_info` that is needed."""

    language_instruction: str | list[str]


def read_hdf5(path: Path, *, keep_idle: bool = False) -> list[RecordedEpisode]:
    """Read all demonstrations of a file, in order of their numbers; frames are read on demand.

    Args:
        path: the file, such as
            `libero_object/pick_up_the_milk_and_place_it_in_the_basket_demo.hdf5`.
        keep_idle: whether to keep idle steps.

    Raises: DataError, naming the file, the demonstration and the missing field.
    """
    import h5py  # slow to import, needed only to read such files

    # HDF5 itself raises KeyError, OSError or RuntimeError for one and the same damage, by where it is
    with reading(path, WHOLE_FILE, DOWNLOAD_AGAIN), h5py.File(path, "r") as file:
        if "data" not in file:
            raise DataError(
                f"{path} has no group 'data', expected LIBERO's demonstrations; "
                f"it has {sorted(file)}."
            )
        data = _get_member(file, "data", f"{path}")
        if not isinstance(data, h5py.Group):
            raise DataError(f"{path}: 'data' is no group, expected one with demonstrations.")
        names = _list_demonstrations(data, path)
        instruction = _read_instruction(path, data.attrs)
        num_late = 1 if any(said in data.attrs for said in LIBERO_ATTRIBUTES) else 0
        return [_read_episode(path, name, data, instruction, keep_idle, num_late) for name in names]


def _list_demonstrations(data: Any, path: Path) -> list[str]:
    """Return the demonstrations in order; compare their number with the file's own."""
    numbers: dict[str, int] = {}
    for name in data:
        if not name.startswith("demo_"):
            continue
        if not re.fullmatch("[0-9]{1,12}", name[5:], re.ASCII):
            raise DataError(f"{path}: 'data' has {excerpt(name)}, expected demo_ and a number.")
        numbers[name] = int(name[5:])
    listed = data.attrs.get("num_demos")
    if listed is not None and not np.array_equal(np.asarray(listed), len(numbers)):
        _log.warning(
            "%s: the attribute 'num_demos' is %s, and there are %d demonstrations, which are read",
            path,
            excerpt(listed),
            len(numbers),
        )
    return sorted(numbers, key=lambda name: numbers[name])


def _get_member(group: Any, name: str, where: str) -> Any:
    """Return a member of a group. Raises: DataError if it is in another file."""
    import h5py

    found = group[name]
    # HDF5 follows links to any path on this machine; a file from elsewhere must not choose what is
    # read.
    numbers = [h5py.h5o.get_info(each.id).fileno for each in (found, group)]
    if numbers[0] != numbers[1]:
        raise DataError(
            f"{where}: {name!r} is a link to {found.file.filename}, expected data in the file "
            "itself; copy them into it."
        )
    return found


def _get_dataset(group: Any, name: str, where: str) -> Any:
    """Return a data set whose numbers are all in the file. Raises: DataError."""
    import h5py

    found = _get_member(group, name, where)
    if not isinstance(found, h5py.Dataset):
        raise DataError(f"{where}: {name!r} is no array, expected a row for each control step.")
    # other files may be anywhere, change later, or be missing on the machine that trains
    if found.is_virtual or found.external:
        raise DataError(
            f"{where}: {name!r} is stored in other files, expected data in the file itself; copy "
            "them into it."
        )
    require_numbers(found, f"{where}: {name!r}")
    stored = found.id.get_storage_size()
    is_whole = found.nbytes <= MOST_COMPRESSED * stored
    if found.chunks is None:
        is_whole = found.nbytes <= stored  # without chunks nothing is compressed
    elif is_whole:
        # parts that were never written would be read as zeros
        parts = (
            math.ceil(size / part) for size, part in zip(found.shape, found.chunks, strict=True)
        )
        is_whole = found.id.get_num_chunks() == math.prod(parts)
    if not is_whole:
        raise DataError(
            f"{where}: {name!r} claims {found.dtype} of shape {excerpt(found.shape)}, and the file "
            f"holds {stored} bytes of it; {DOWNLOAD_AGAIN}."
        )
    return found


def _read_numbers(group: Any, name: str, where: str, axes: int) -> np.ndarray:
    """Return an array of one or two axes, float32. Raises: DataError."""
    found = _get_dataset(group, name, where)
    with reading(f"{where}: {name!r}", "an array that can be read", DOWNLOAD_AGAIN):
        values = np.asarray(found)
    if values.ndim != axes:
        raise DataError(
            f"{where}: {name!r} is {list(values.shape)}, expected {'[T, D]' if axes == 2 else '[T]'}."
        )
    with np.errstate(over="ignore"):  # infinite, and refused as such
        return values.astype(np.float32)


def is_idle(action: np.ndarray, last_kept: np.ndarray | None) -> bool:
    """Return whether an action [D] changes nothing compared with the last one kept.

    None: there is none yet.
    """
    moves = float(np.linalg.norm(action[:-1])) >= IDLE_NORM
    return not moves and (last_kept is None or action[-1] == last_kept[-1])


def _read_episode(
    path: Path, name: str, data: Any, instruction: str, keep_idle: bool, num_late: int
) -> RecordedEpisode:
    where = f"{path}: {name}"
    with reading(where, "a group of LIBERO's layout", DOWNLOAD_AGAIN):
        demo = _get_member(data, name, str(path))
        for field in FIELDS:
            if field not in demo:
                raise DataError(
                    f"{where} has no {field!r}, expected LIBERO's layout; it has {_list_fields(demo)}."
                )
        # Rewards and the camera in the hand are read if they are there: a policy may need neither.
        fields = [field for field in (*FIELDS, *CAMERAS.values(), "rewards") if field in demo]
        lengths = {field: len(_get_dataset(demo, field, where)) for field in fields}
        if len(set(lengths.values())) > 1:
            raise DataError(
                f"{where} has fields of different lengths: {lengths}; expected a row for "
                "each control step."
            )
        for field in CAMERAS.values():
            if field in fields:
                require_images(demo[field], f"{where}: {field!r}")
        actions = _read_numbers(demo, "actions", where, 2)
        state = np.concatenate(
            [_read_numbers(demo, field, where, 2) for field in FIELDS[2:]], axis=1
        )
        rewards = _read_numbers(demo, "rewards", where, 1) if "rewards" in fields else None
    steps = np.arange(len(actions)) if keep_idle else _steps_that_move(actions)
    kept = steps[steps >= num_late]
    if len(kept) == 0:
        raise DataError(
            f"{where} has no usable action: all are idle or lack an observation before them."
        )
    seen = kept - num_late
    return RecordedEpisode(
        name=where,
        instruction=instruction,
        actions=actions[kept],
        vectors={"state": state[seen]},
        frames={
            key: partial(_read_frame, path, f"data/{name}/{field}", seen)
            for key, field in CAMERAS.items()
            if field in fields
        },
        rewards=rewards[kept] if rewards is not None else None,
        about={"task": path.stem.removesuffix("_demo")},
    )


def _steps_that_move(actions: np.ndarray) -> np.ndarray:
    kept: list[int] = []
    for step, action in enumerate(actions):
        if not is_idle(action, actions[kept[-1]] if kept else None):
            kept.append(step)
    return np.array(kept, np.int64)


def _read_frame(path: Path, dataset: str, rows: np.ndarray, step: int) -> np.ndarray:
    import h5py

    with (
        reading(
            f"{path}: {dataset}, row {rows[step]}", "an image that can be read", DOWNLOAD_AGAIN
        ),
        h5py.File(path, "r") as file,
    ):
        frame = np.asarray(file[dataset][rows[step]])
        return np.ascontiguousarray(frame[::-1, ::-1])


def _read_instruction(path: Path, attributes: Any) -> str:
    """Return the task in words: from the file's own description, else from its name."""
    if "problem_info" not in attributes:
        return _SCENE_PREFIX.sub("", _SUFFIX.sub("", path.stem)).replace("_", " ")
    with reading(
        f"{path}: the attribute 'problem_info'", "a description of the task", DOWNLOAD_AGAIN
    ):
        about = msgspec.json.decode(attributes["problem_info"], type=_ProblemInfo)
    said = about.language_instruction
    return ("".join(said) if isinstance(said, list) else said).strip().strip('"')


def _list_fields(demo: Any) -> list[str]:
    return sorted(
        [name for name in demo if name != "obs"] + [f"obs/{name}" for name in demo.get("obs", ())]
    )
