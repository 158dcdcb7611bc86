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

import json
import re
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from vla_rl.data.episode import RecordedEpisode
from vla_rl.errors import DataError

FIELDS: Final = ("actions", "obs/agentview_rgb", "obs/ee_pos", "obs/ee_ori", "obs/gripper_states")
OF_LIBERO: Final = ("problem_info", "env_args", "bddl_file_name")
"""Attributes of `data` of which LIBERO's own tools write one or more."""

CAMERAS: Final = {"image": "obs/agentview_rgb", "wrist_image": "obs/eye_in_hand_rgb"}
IDLE_NORM: Final = 1e-4

_SCENE_PREFIX = re.compile(r"^[A-Z_]+_SCENE\d+_")
_SUFFIX = re.compile(r"_demo$")


def read_hdf5(path: Path, *, keep_idle: bool = False) -> list[RecordedEpisode]:
    """Read all demonstrations of a file, in order of their numbers; frames are read on demand.

    Args:
        path: the file, such as
            `libero_object/pick_up_the_milk_and_place_it_in_the_basket_demo.hdf5`.
        keep_idle: whether to keep idle steps.

    Raises: DataError, naming the file, the demonstration and the missing field.
    """
    import h5py  # needed only to read such files

    try:
        with h5py.File(path, "r") as file:
            if "data" not in file:
                raise DataError(
                    f"{path} has no group 'data', expected LIBERO's demonstrations; "
                    f"it has {sorted(file)}."
                )
            data = file["data"]
            names = sorted(
                (name for name in data if name.startswith("demo_")), key=lambda name: int(name[5:])
            )
            instruction = _instruction(path, data.attrs)
            num_late = 1 if any(said in data.attrs for said in OF_LIBERO) else 0
            return [
                _episode(path, name, data[name], instruction, keep_idle, num_late) for name in names
            ]
    except OSError as error:
        raise DataError(f"{path} is not a whole HDF5 file: {error}") from error


def is_idle(action: np.ndarray, last_kept: np.ndarray | None) -> bool:
    """Return whether an action [D] changes nothing compared with the last one kept.

    None: there is none yet.
    """
    moves = float(np.linalg.norm(action[:-1])) >= IDLE_NORM
    return not moves and (last_kept is None or action[-1] == last_kept[-1])


def _episode(
    path: Path, name: str, demo: Any, instruction: str, keep_idle: bool, num_late: int
) -> RecordedEpisode:
    where = f"{path}: {name}"
    for field in FIELDS:
        if field not in demo:
            raise DataError(
                f"{where} has no {field!r}, expected LIBERO's layout; it has {_fields_of(demo)}."
            )
    lengths = {
        field: len(demo[field])
        for field in (*FIELDS, *CAMERAS.values(), "rewards")
        if field in demo
    }
    if len(set(lengths.values())) > 1:
        raise DataError(
            f"{where} has fields of different lengths: {lengths}; expected a row for "
            "each control step."
        )
    actions = np.asarray(demo["actions"], np.float32)
    steps = np.arange(len(actions)) if keep_idle else _steps_that_move(actions)
    kept = steps[steps >= num_late]
    if len(kept) == 0:
        raise DataError(
            f"{where} has no usable action: all are idle or lack an observation before them."
        )
    seen = kept - num_late
    state = np.concatenate([np.asarray(demo[field], np.float32) for field in FIELDS[2:]], axis=1)
    return RecordedEpisode(
        name=where,
        instruction=instruction,
        actions=actions[kept],
        vectors={"state": state[seen]},
        frames={
            key: partial(_frame, path, f"data/{name}/{field}", seen)
            for key, field in CAMERAS.items()
            if field in demo
        },
        rewards=np.asarray(demo["rewards"], np.float32)[kept] if "rewards" in demo else None,
        about={"task": path.stem.removesuffix("_demo")},
    )


def _steps_that_move(actions: np.ndarray) -> np.ndarray:
    kept: list[int] = []
    for step, action in enumerate(actions):
        if not is_idle(action, actions[kept[-1]] if kept else None):
            kept.append(step)
    return np.array(kept, np.int64)


def _frame(path: Path, dataset: str, rows: np.ndarray, step: int) -> np.ndarray:
    import h5py

    try:
        with h5py.File(path, "r") as file:
            frame = np.asarray(file[dataset][rows[step]])
    except OSError as error:
        raise DataError(f"{path}: {dataset}, row {rows[step]} cannot be read: {error}") from error
    return np.ascontiguousarray(frame[::-1, ::-1])


def _instruction(path: Path, attributes: Any) -> str:
    """Return the task in words: from the file's own description, else from its name."""
    if "problem_info" not in attributes:
        return _SCENE_PREFIX.sub("", _SUFFIX.sub("", path.stem)).replace("_", " ")
    try:
        said = json.loads(attributes["problem_info"])["language_instruction"]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path}: the attribute 'problem_info' has no 'language_instruction' ({error})."
        ) from error
    words = "".join(said) if isinstance(said, list) else str(said)
    return words.strip().strip('"')


def _fields_of(demo: Any) -> list[str]:
    return sorted(
        [name for name in demo if name != "obs"] + [f"obs/{name}" for name in demo.get("obs", ())]
    )
