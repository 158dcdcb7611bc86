"""Our own recordings: one `.npz` an episode, as `record_demonstrations` writes them."""

import json
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from vla_rl.data.episode import RecordedEpisode
from vla_rl.errors import DataError

_FRAMES = ("image", "wrist_image")


def settings_of_pictures(folder: Path) -> dict[str, Any] | None:
    """Return image size, quality and, for LIBERO, the folder of assets of all recordings in a
    folder; None if it has none of ours.

    Raises: DataError if a file cannot be read, or if recordings differ.
    """
    found: dict[Path, dict[str, Any]] = {}
    for path in sorted(folder.rglob("*.settings.json")):
        try:
            settings = json.loads(path.read_bytes())
            found[path] = {name: settings.get(name) for name in ("image_size", "quality", "assets")}
        except (OSError, ValueError, AttributeError) as error:
            raise DataError(f"{path} is not the settings of a recording: {error}") from error
    for path, settings in found.items():
        first = next(iter(found))
        if settings != found[first]:
            raise DataError(
                f"{path} says {settings}, and {first} says {found[first]}; expected pictures of one "
                "kind in a data set: record one of them again"
            )
    return next(iter(found.values()), None)


def read_recording(path: Path) -> RecordedEpisode:
    """Read one file, with its frames. Raises: DataError, naming the file and the missing array."""
    try:
        with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
            columns = {name: file[name] for name in file.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(
            f"{path} is not a recorded demonstration: {error}; record it again."
        ) from error
    lost = [name for name in ("action", "state", "instruction", "image") if name not in columns]
    if lost:
        raise DataError(
            f"{path} is not a recorded demonstration: no {lost[0]!r}, only {sorted(columns)}."
        )
    for name in _FRAMES:
        if name in columns and len(columns[name]) != len(columns["action"]):
            expected = f"expected {len(columns['action'])}, one for each action"
            raise DataError(f"{path} has {len(columns[name])} pictures of {name!r}, {expected}.")
    about = {name: columns[name].item() for name in ("task", "init_state_id") if name in columns}
    return RecordedEpisode(
        name=str(path),
        instruction=str(columns["instruction"]),
        actions=np.asarray(columns["action"], np.float32),
        vectors={"state": np.asarray(columns["state"], np.float32)},
        frames={name: columns[name].__getitem__ for name in _FRAMES if name in columns},
        is_success=bool(columns["is_success"]) if "is_success" in columns else None,
        about=about,
    )
