"""Our own recordings: one `.npz` an episode, as `record_demonstrations` writes them."""

from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from vla_rl.datasets.episode import RecordedEpisode
from vla_rl.errors import DataError
from vla_rl.util.arrays import read_npz
from vla_rl.util.foreign_data import get_text, get_whole_number, reading
from vla_rl.util.values import excerpt

_FRAMES: Final = ("image", "wrist_image")
_NUMBERS: Final = "biuf"
"""NumPy's letters of the types that become float32."""

A_RECORDING: Final = "a recorded demonstration"


class PictureSettings(msgspec.Struct, kw_only=True):
    """The fields of a `.settings.json` that say what pictures show."""

    image_size: int | None = None
    quality: str | None = None
    assets: str | None = None


def settings_of_pictures(folder: Path) -> dict[str, Any] | None:
    """Return image size, quality and, for LIBERO, the folder of assets of all recordings in a
    folder; None if it has none of ours.

    Raises: DataError if a file cannot be read, or if recordings differ.
    """
    found: dict[Path, PictureSettings] = {}
    with reading(folder, "a folder that can be listed", "check its permissions"):
        paths = sorted(folder.rglob("*.settings.json"))
    for path in paths:
        with reading(path, "the settings of a recording", "record the demonstrations again"):
            found[path] = msgspec.json.decode(path.read_bytes(), type=PictureSettings)
    for path, settings in found.items():
        first = next(iter(found))
        if settings != found[first]:
            raise DataError(
                f"{path} says {msgspec.to_builtins(settings)}, and {first} says "
                f"{msgspec.to_builtins(found[first])}; expected pictures of one kind in a data set: "
                "record one of them again"
            )
    return next((msgspec.to_builtins(settings) for settings in found.values()), None)


def read_recording(path: Path) -> RecordedEpisode:
    """Read one file, with its frames. Raises: DataError, naming the file and the wrong array."""
    with reading(path, A_RECORDING, "record it again"):
        columns = read_npz(path)
        plain = {name: values.item() for name, values in columns.items() if values.shape == ()}
    lost = [name for name in ("action", "state", "instruction", "image") if name not in columns]
    if lost:
        raise DataError(f"{path} is not {A_RECORDING}: no {lost[0]!r}, only {sorted(columns)}.")
    actions, state = (_numbers(columns[name], name, path) for name in ("action", "state"))
    for name in _FRAMES:
        if name in columns:
            _require_frames(columns[name], name, len(actions), path)
    about: dict[str, str | int | float | bool] = {}
    if "task" in columns:
        about["task"] = get_text(plain, "task", str(path))
    if "init_state_id" in columns:
        about["init_state_id"] = get_whole_number(plain, "init_state_id", str(path))
    return RecordedEpisode(
        name=str(path),
        instruction=get_text(plain, "instruction", str(path)),
        actions=actions,
        vectors={"state": state},
        frames={name: columns[name].__getitem__ for name in _FRAMES if name in columns},
        is_success=_truth(plain, "is_success", path) if "is_success" in columns else None,
        about=about,
    )


def _numbers(values: np.ndarray, name: str, path: Path) -> np.ndarray:
    if values.dtype.kind not in _NUMBERS or values.ndim == 0:
        raise DataError(
            f"{path}: {name!r} is {values.dtype} of shape {list(values.shape)}, expected numbers, a "
            "row for each control step."
        )
    with np.errstate(over="ignore"):  # infinite, and refused as such
        return np.asarray(values, np.float32)


def _require_frames(frames: np.ndarray, name: str, num_steps: int, path: Path) -> None:
    if frames.ndim > 0 and len(frames) != num_steps:
        expected = f"expected {num_steps}, one for each action"
        raise DataError(f"{path} has {len(frames)} pictures of {name!r}, {expected}.")
    if frames.dtype != np.uint8 or frames.ndim != 4 or frames.shape[3] != 3:
        raise DataError(
            f"{path}: {name!r} is {frames.dtype} of shape {list(frames.shape)}, expected pictures, "
            "uint8 [T, H, W, 3]."
        )


def _truth(plain: dict[str, Any], name: str, path: Path) -> bool:
    value = plain.get(name)
    if value not in (False, True) or isinstance(value, str):
        raise DataError(f"{path}: {name!r} is {excerpt(value)}, expected true or false.")
    return bool(value)
