"""Names of checkpoint folders: find the newest, remove old ones, and leave others alone.

update-000012          a checkpoint; update-000012-1 is a newer one of the same update
best                   link to the checkpoint that did best on held-out starts; never removed
.writing-update-...    half-written
.removing-update-...   half-removed
aside-update-000015    newer than the checkpoint from which a run was resumed, or not complete
"""

import logging
import os
import re
import shutil
import threading
from collections.abc import Collection
from pathlib import Path
from typing import Final

import msgspec

from vla_rl.errors import CheckpointError
from vla_rl.util.atomic_files import MANIFEST, is_abandoned

logger = logging.getLogger(__name__)

HEADER: Final = "checkpoint.json"

BEST: Final = "best"
"""Name of the link to the best checkpoint."""

REMOVING: Final = ".removing-"

_REMOVING: Final = threading.Lock()
"""Held while folders are removed. One checkpoint is pruned while the next is prepared, and a
half-removed folder looks like one that a crash left."""

_NAME: Final = re.compile(r"update-(\d{6,})(?:-(\d+))?")


class CheckpointHeader(msgspec.Struct, frozen=True, omit_defaults=True):
    """Update and agents of a checkpoint."""

    format: int
    weight_version: int
    agents: tuple[str, ...] = ()
    """Names of the agents, if several policies learn."""


def read_header(folder: Path) -> CheckpointHeader:
    """Read the header of a checkpoint. Raises: CheckpointError."""
    try:
        return msgspec.json.decode((folder / HEADER).read_bytes(), type=CheckpointHeader)
    except (OSError, ValueError, RecursionError) as error:  # ValueError: not JSON, or not text
        raise CheckpointError(
            f"{folder / HEADER} cannot be read: {error}; the checkpoint is damaged."
        ) from error


def update_in_name(folder: Path) -> int | None:
    """Return the update that a folder is named for; None for any other name."""
    match = _NAME.fullmatch(folder.name)
    return None if match is None else int(match[1])


def list_checkpoints(root: Path) -> list[Path]:
    """Return the completed checkpoints below `root`, oldest first, without half-written and renamed
    ones.
    """
    renamed = renamed_checkpoints(root)
    return [folder for folder in _completed(root) if folder not in renamed]


def newest_name(root: Path) -> str:
    """Describe the newest completed checkpoint for an error message.

    This works even if the disk cannot be read.
    """
    try:
        newest = latest_checkpoint(root)
    except OSError as error:
        return f"unknown, as {root} cannot be read ({error.strerror})"
    return "none" if newest is None else str(newest)


def latest_checkpoint(root: Path) -> Path | None:
    """Return the newest completed checkpoint below `root`, or None."""
    checkpoints = list_checkpoints(root)
    return checkpoints[-1] if checkpoints else None


def find_checkpoint(root: Path, version: int) -> Path | None:
    """Return the newest completed checkpoint of an update below `root`, or None."""
    found = [folder for folder in list_checkpoints(root) if update_in_name(folder) == version]
    return found[-1] if found else None


def best_checkpoint(root: Path) -> Path | None:
    """Return the checkpoint that the link `best` below `root` points to.

    None if there is none, or if it was removed or renamed.
    """
    link = root / BEST
    if not link.is_symlink():
        return None
    folder = root / os.readlink(link)
    return folder if folder in list_checkpoints(root) else None


def set_best(root: Path, folder: Path | None) -> None:
    """Let the link `best` point to a checkpoint below `root`; None removes the link.

    Raises: OSError.
    """
    # replaced in one step: a reader between unlink and symlink would find no best checkpoint
    link, new = root / BEST, root / f".{BEST}-{os.getpid()}"
    if folder is None:
        link.unlink(missing_ok=True)
        return
    new.unlink(missing_ok=True)
    new.symlink_to(folder.name)  # relative, so that a run's folder can be moved
    os.replace(new, link)


def renamed_checkpoints(root: Path) -> dict[Path, int]:
    """Return the folders below `root` whose name and header disagree about the update, with the
    update of the header.

    They never count as the newest or as checkpoints to keep, and are never removed.
    """
    # by the header and not the name: names are what people change
    versions = {folder: _header_version(folder) for folder in _completed(root)}
    return {
        folder: version
        for folder, version in versions.items()
        if version not in (None, _age(folder)[0])
    }


def set_newer_aside(root: Path, folder: Path) -> list[Path]:
    """Rename the checkpoints below `root` that are newer than `folder`, so that a run can resume
    from it; return the new names.

    They keep their content, but are no longer found or removed. Raises: CheckpointError.
    """
    # set aside and not deleted: a user who resumes from an older one may have done so by mistake
    newer = [each for each in list_checkpoints(root) if _age(each) > _age(folder)]
    return [_set_aside(each) for each in newer]


def incomplete_checkpoints(root: Path) -> list[Path]:
    """Return the folders below `root` that are named as checkpoints and have no manifest, oldest
    first.

    Nothing here leaves such a folder: its manifest was lost with a disk, or by another program.
    """
    found = [path for path in _named(root) if not os.path.lexists(path / MANIFEST)]
    return sorted(found, key=_age)


def set_incomplete_aside(root: Path) -> list[Path]:
    """Rename the folders that `incomplete_checkpoints` finds, which are never removed; return the
    new names.

    Raises: CheckpointError.
    """
    return [_set_aside(each) for each in incomplete_checkpoints(root)]


def _set_aside(folder: Path) -> Path:
    number, target = 1, folder.with_name(f"aside-{folder.name}")
    while os.path.lexists(target):
        number += 1
        target = folder.with_name(f"aside-{folder.name}-{number}")
    try:
        folder.rename(target)
    except OSError as error:
        raise CheckpointError(
            f"{folder} cannot be renamed to {target.name}: {error.strerror}"
        ) from error
    return target


def free_name(root: Path, weight_version: int) -> Path:
    """Return a name that no checkpoint of this update has."""
    name = f"update-{weight_version:06d}"
    folder, again = root / name, 0
    while folder.exists():
        again += 1
        folder = root / f"{name}-{again}"
    return folder


def remove_leftovers(root: Path) -> None:
    """Remove folders that were half-written or half-removed when a process died.

    A folder with a checkpoint's name and no manifest is none of these: it is set aside, with one
    line.
    """
    with _REMOVING:
        for path in root.iterdir() if root.is_dir() else ():
            # only names that this program gives: a folder of somebody else below `root` is none of
            # its business
            is_unfinished = is_abandoned(path) and "update-" in path.name
            if is_unfinished or path.name.startswith(f"{REMOVING}update-"):
                shutil.rmtree(path, ignore_errors=True)
        for path in set_incomplete_aside(root):
            logger.warning(
                "%s has no %s, so it is no checkpoint that can be used; it is kept as %s",
                path.name.removeprefix("aside-"),
                MANIFEST,
                path,
            )


def prune(root: Path, keep_last: int, keep: Collection[int] = ()) -> None:
    """Remove all but the newest checkpoints, the best one, and those of the updates in `keep`.

    A failure to remove one is logged and does not end the run.
    """
    try:
        with _REMOVING:
            best = best_checkpoint(root)
            for old in list_checkpoints(root)[:-keep_last]:
                if old == best or update_in_name(old) in keep:
                    continue
                # renamed first, then deleted: what a crash in between leaves is not mistaken for a
                # checkpoint, nor for one that lost its manifest
                going = old.with_name(f"{REMOVING}{old.name}-{os.getpid()}")
                shutil.rmtree(going, ignore_errors=True)
                old.rename(going)
                shutil.rmtree(going)
    except OSError as error:
        logger.warning("old checkpoints below %s could not be removed: %s", root, error)


def _completed(root: Path) -> list[Path]:
    """Return the folders with a checkpoint's name and a manifest, ordered by name, oldest first."""
    # a manifest that is there and cannot be read is damage, which reading the checkpoint reports
    return sorted((path for path in _named(root) if os.path.lexists(path / MANIFEST)), key=_age)


def _named(root: Path) -> list[Path]:
    folders = root.iterdir() if root.is_dir() else ()
    return [path for path in folders if _NAME.fullmatch(path.name) and path.is_dir()]


def _header_version(folder: Path) -> int | None:
    """Return the update in a checkpoint's header.

    None if it cannot be read, which loading it reports.
    """
    try:
        return read_header(folder).weight_version
    except CheckpointError:
        return None


def _age(folder: Path) -> tuple[int, int]:
    match = _NAME.fullmatch(folder.name)
    assert match is not None
    return int(match[1]), int(match[2] or 0)
