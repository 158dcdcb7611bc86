"""LIBERO's demonstrations: one HDF5 file a task, `data/demo_0`, `data/demo_1` and so on, as its authors publish them.

    actions                    [T, 7], as the environment takes them: gripper +1 closes, -1 opens
    obs/agentview_rgb          uint8 [T, 128, 128, 3], upside down and mirrored: turned by 180 degrees here
    obs/eye_in_hand_rgb        the same for the camera in the hand
    obs/ee_pos, ee_ori         [T, 3] each, position (m) and axis times angle (rad)
    obs/gripper_states         [T, 2], finger joints (m)

Idle steps, in which the demonstrator paused, are left out, as OpenVLA's data have it: an action whose first six numbers
have a norm below 1e-4 and whose gripper command is that of the last step kept. (OpenVLA's authors also played the rest again
at 256 pixels and dropped what then failed; the frames here are those of the file.)
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
CAMERAS: Final = {"image": "obs/agentview_rgb", "wrist_image": "obs/eye_in_hand_rgb"}
IDLE_NORM: Final = 1e-4

_SCENE_PREFIX = re.compile(r"^[A-Z_]+_SCENE\d+_")
_SUFFIX = re.compile(r"_demo$")


def read_hdf5(path: Path, *, keep_idle: bool = False) -> list[RecordedEpisode]:
    """All demonstrations of a file, in order of their numbers; frames are read when they are asked for.

    Args:
        path: such as `libero_object/pick_up_the_milk_and_place_it_in_the_basket_demo.hdf5`.
        keep_idle: keep the steps in which nothing was commanded.

    Raises: DataError naming the file, the demonstration and the field that it lacks.
    """
    import h5py  # only where such files are read

    try:
        with h5py.File(path, "r") as file:
            if "data" not in file:
                raise DataError(f"{path} has no group 'data', expected LIBERO's demonstrations; it has {sorted(file)}.")
            data = file["data"]
            names = sorted((name for name in data if name.startswith("demo_")), key=lambda name: int(name[5:]))
            instruction = _instruction(path, data.attrs)
            return [_episode(path, name, data[name], instruction, keep_idle) for name in names]
    except OSError as error:
        raise DataError(f"{path} is not a whole HDF5 file: {error}") from error


def is_idle(action: np.ndarray, last_kept: np.ndarray | None) -> bool:
    """Whether an action [D] changes nothing, given the last one that was kept (None: there is none yet)."""
    moves = float(np.linalg.norm(action[:-1])) >= IDLE_NORM
    return not moves and (last_kept is None or action[-1] == last_kept[-1])


def _episode(path: Path, name: str, demo: Any, instruction: str, keep_idle: bool) -> RecordedEpisode:
    where = f"{path}: {name}"
    for field in FIELDS:
        if field not in demo:
            raise DataError(f"{where} has no {field!r}, expected LIBERO's layout; it has {_fields_of(demo)}.")
    actions = np.asarray(demo["actions"], np.float32)
    lengths = {field: len(demo[field]) for field in FIELDS}
    if len(set(lengths.values())) > 1:
        raise DataError(f"{where} has fields of different lengths: {lengths}.")
    kept = np.arange(len(actions)) if keep_idle else _steps_that_move(actions)
    if len(kept) == 0:
        raise DataError(f"{where} has idle steps only, expected a demonstration.")
    state = np.concatenate([np.asarray(demo[field], np.float32) for field in FIELDS[2:]], axis=1)
    return RecordedEpisode(
        name=where,
        instruction=instruction,
        actions=actions[kept],
        vectors={"state": state[kept]},
        frames={
            key: partial(_frame, path, f"data/{name}/{field}", kept) for key, field in CAMERAS.items() if field in demo
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


def _frame(path: Path, dataset: str, kept: np.ndarray, step: int) -> np.ndarray:
    import h5py

    try:
        with h5py.File(path, "r") as file:
            frame = np.asarray(file[dataset][kept[step]])
    except OSError as error:
        raise DataError(f"{path}: {dataset}, step {kept[step]} cannot be read: {error}") from error
    return np.ascontiguousarray(frame[::-1, ::-1])


def _instruction(path: Path, attributes: Any) -> str:
    """The task in words: from the file's own description, else from its name."""
    if "problem_info" not in attributes:
        return _SCENE_PREFIX.sub("", _SUFFIX.sub("", path.stem)).replace("_", " ")
    try:
        said = json.loads(attributes["problem_info"])["language_instruction"]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: the attribute 'problem_info' has no 'language_instruction' ({error}).") from error
    words = "".join(said) if isinstance(said, list) else str(said)
    return words.strip().strip('"')


def _fields_of(demo: Any) -> list[str]:
    return sorted([name for name in demo if name != "obs"] + [f"obs/{name}" for name in demo.get("obs", ())])
