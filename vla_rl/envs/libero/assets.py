"""Where LIBERO's meshes, textures and scenes come from, in this order:

1. the folder that was asked for, by argument or in `VLA_RL_LIBERO_ASSETS`;
2. the installed LIBERO's own folder;
3. the folder into which hf-libero downloads (`python -m vla_rl.envs.libero.download_assets` fills it);
4. the stand-ins that ship with this package, announced in one line: results with them are not comparable.

A folder that was asked for is never replaced: where it lacks a file, that file is named. Nothing is ever downloaded on
the way to an environment.
"""

import importlib.resources
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from vla_rl.envs.libero.tasks import libero_root

ASSETS_VARIABLE = "VLA_RL_LIBERO_ASSETS"
STAND_INS = "stand-ins"
"""The name of the shipped stand-ins, where a folder can be given and where results record what they were made with."""

STAND_INS_MARK = "STAND_INS.txt"
"""A file that every tree of stand-ins has, so that a copy of it is still known for what it is."""

_NEEDED = ("scenes", "textures")
_ANNOUNCED = "VLA_RL_STAND_INS_ANNOUNCED"
_CACHE = "~/.cache/libero/assets"

HOW_TO_GET_ASSETS = (
    "Either set VLA_RL_LIBERO_ASSETS (or the env's `assets`) to LIBERO's libero/libero/assets folder, "
    "or download lerobot/libero-assets to {cache} with `python -m vla_rl.envs.libero.download_assets`, "
    "or copy that folder to {package}, "
    "or play with the shipped stand-ins: set it to `stand-ins`."
)


@dataclass(frozen=True)
class Assets:
    """A folder of LIBERO's assets."""

    path: Path

    source: str
    """configured, package, hf-libero or stand-ins. Results record it: those with stand-ins are not comparable."""


def find_assets(folder: str | os.PathLike[str] | None = None) -> Assets:
    """The assets to use.

    The first process of a tree that comes to use stand-ins says so on stderr; processes that it starts afterwards find
    a mark in their environment and stay quiet. So whoever starts environments in other processes looks here first.

    Args:
        folder: use this one, or "stand-ins" for those; None to look in all places.

    Raises: `FileNotFoundError` naming the folder, what it lacks and the ways to put it right.
    """
    asked = folder if folder is not None else os.environ.get(ASSETS_VARIABLE) or None
    if asked is not None and os.fspath(asked) != STAND_INS:
        path = Path(asked)
        if not _is_complete(path):
            raise FileNotFoundError(f"LIBERO's assets were not found in {path} ({_lacks(path)}). {how_to_get_assets()}")
        assets = Assets(path.resolve(), STAND_INS if (path / STAND_INS_MARK).is_file() else "configured")
    else:
        found = _installed() if asked is None else None
        assets = found or Assets(_shipped(), STAND_INS)
    if assets.source == STAND_INS:
        _announce_once(assets, was_asked_for=asked is not None)
    return assets


def cache_folder() -> Path:
    """Where hf-libero keeps its download."""
    return Path(_CACHE).expanduser()


def missing_asset(assets: Path, detail: str) -> FileNotFoundError:
    """The error for a folder that lacks a file which a task needs; `detail` names the file."""
    return FileNotFoundError(f"the LIBERO assets in {assets} are not complete: {detail}. {how_to_get_assets()}")


def how_to_get_assets() -> str:
    """The ways to get LIBERO's assets on this machine."""
    return HOW_TO_GET_ASSETS.format(cache=cache_folder(), package=libero_root() / "assets")


def _installed() -> Assets | None:
    for source, path in (("package", libero_root() / "assets"), ("hf-libero", cache_folder())):
        if _is_complete(path):
            return Assets(path.resolve(), source)
    return None


def _shipped() -> Path:
    return Path(str(importlib.resources.files("vla_rl") / "assets" / "libero_stand_ins"))


def _is_complete(folder: Path) -> bool:
    return all((folder / name).is_dir() for name in _NEEDED)


def _lacks(folder: Path) -> str:
    if not folder.is_dir():
        return "no such folder"
    return "no " + " or ".join(f"{name}/" for name in _NEEDED if not (folder / name).is_dir()) + " in it"


def _announce_once(assets: Assets, was_asked_for: bool) -> None:
    if os.environ.get(_ANNOUNCED):
        return
    os.environ[_ANNOUNCED] = "1"
    reason = "as asked" if was_asked_for else f"LIBERO's own were not found; {ASSETS_VARIABLE} may name their folder"
    print(
        f"LIBERO is played with stand-in assets ({reason}): results are not comparable with published ones.",
        file=sys.stderr,
        flush=True,
    )
