"""Models that MuJoCo has built, kept on disk: a scene is built once on a machine and then read.

MuJoCo needs 0.9 s of a core to build a scene of the stand-ins, and 0.1 s to read it. A kept model
has every bit of the built one. Scenes of LIBERO's own assets, 220 MB each, are built every time.
"""

import contextlib
import hashlib
import os
import re
from pathlib import Path
from typing import Any, Final

import numpy as np

from vla_rl.envs.libero.simulator import load_simulator
from vla_rl.envs.mujoco.loading import cache_folder

_MOST_BYTES: Final = 1 << 30
"""Room of all kept models. Those that were not used for longest are removed first."""

_LARGEST_BYTES: Final = 128 << 20
"""Larger models are not kept: a suite of them would fill the room and find nothing there."""

_FILE: Final = re.compile(r' file\w*="([^"]*)"')


def built_model(xml: str) -> Any:
    """Return MuJoCo's model of this XML: the kept one if neither the XML nor a file that it names
    has changed since, else a new one, which is kept.

    Raises: `ValueError` of MuJoCo.
    """
    mujoco = load_simulator().mujoco
    try:
        kept = _folder() / f"{_digest(mujoco.__version__, xml)}.mjb"
    except OSError:  # a file is missing, which MuJoCo reports
        return mujoco.MjModel.from_xml_string(xml)
    if kept.is_file():
        with contextlib.suppress(ValueError, OSError):
            model = mujoco.MjModel.from_binary_path(str(kept))
            os.utime(kept)
            return model
    model = mujoco.MjModel.from_xml_string(xml)
    if mujoco.mj_sizeModel(model) <= _LARGEST_BYTES:
        with contextlib.suppress(OSError):  # a full disk costs time and no scene
            _keep(mujoco, model, kept)
    return model


def _folder() -> Path:
    folder = cache_folder() / "models"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def _digest(version: str, xml: str) -> str:
    found = hashlib.sha256(f"{version}\n{xml}".encode())
    for name in sorted(set(_FILE.findall(xml))):
        status = Path(name).stat()
        found.update(f"{name} {status.st_size} {status.st_mtime_ns}\n".encode())
    return found.hexdigest()[:32]


def _keep(mujoco: Any, model: Any, path: Path) -> None:
    data = np.empty(mujoco.mj_sizeModel(model), np.uint8)
    mujoco.mj_saveModel(model, None, data)
    _make_room(path.parent, data.nbytes)
    part = path.with_suffix(f".{os.getpid()}.part")
    try:
        part.write_bytes(data.data)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def _make_room(folder: Path, size: int) -> None:
    kept = [(file.stat().st_mtime_ns, file.stat().st_size, file) for file in folder.iterdir()]
    for _, other_size, file in sorted(kept, reverse=True):
        size += other_size
        if size > _MOST_BYTES:
            file.unlink(missing_ok=True)
