"""Resume a run from its newest complete checkpoint, from a named one, or from its beginning."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from vla_rl.errors import CheckpointError, ConfigError
from vla_rl.evaluation.held_out import Judge
from vla_rl.learning.checkpoint_folders import (
    BEST,
    best_checkpoint,
    list_checkpoints,
    renamed_checkpoints,
    set_newer_aside,
    update_in_name,
)
from vla_rl.observe import RunDirectory

T = TypeVar("T")


async def checkpoint_to_resume(
    run: RunDirectory, name: str | None, read: Callable[[Path], Awaitable[T]]
) -> tuple[Path, T] | None:
    """Return the checkpoint to resume from, and what `read` returns for it.

    None if the run has no checkpoint yet.

    Args:
        run: the run's directory.
        name: the checkpoint's folder, such as `update-000012`, or `best`; None for the newest
            complete one, with a printed line about each newer one that is damaged.
        read: reads a folder, such as `load_checkpoint`.

    Raises: ConfigError if there is no checkpoint `name`; CheckpointError if the named one, or every
    one, is damaged.
    """
    for folder, version in renamed_checkpoints(run.checkpoints).items():
        print(
            f"{folder} is not used: its content is of update {version}, unlike its name", flush=True
        )
    folders = list_checkpoints(run.checkpoints)
    if name is not None:
        return await _named(run, name, folders, read)
    complaints = []
    for folder in reversed(folders):
        try:
            found = await read(folder)
        except CheckpointError as error:
            complaints.append(str(error))
            continue
        for complaint in complaints:
            print(f"{complaint} Resuming from the older {folder.name} instead", flush=True)
        return folder, found
    half_removed = [path for path in _entries(run.checkpoints) if update_in_name(path) is not None]
    if complaints or half_removed:
        raise CheckpointError(
            f"{run.checkpoints} holds no complete checkpoint, so there is nothing to resume from: "
            + " ".join(complaints or [f"{path.name} is not complete." for path in half_removed])
        )
    return None


async def leave_later(
    run: RunDirectory, folder: Path | None, version: int, judge: Judge | None
) -> None:
    """Set aside checkpoints and results of later weights than `folder`'s.

    A run resumed from there makes them again.

    Prints a line about each checkpoint, or that there is none.

    Raises: CheckpointError, ConfigError if something cannot be written.
    """
    if folder is None:
        print(f"{run.path} has no checkpoint yet: starting from its beginning", flush=True)
    else:
        for moved in await asyncio.to_thread(set_newer_aside, run.checkpoints, folder):
            print(f"{moved.name.removeprefix('aside-')} is kept as {moved}", flush=True)
    if judge is not None:
        try:
            await asyncio.to_thread(judge.leave_later, run, version)
        except OSError as error:
            raise ConfigError(
                f"the results in {run.path} cannot be written: {error}; make room first"
            ) from error


async def _named(
    run: RunDirectory, name: str, folders: list[Path], read: Callable[[Path], Awaitable[T]]
) -> tuple[Path, T]:
    folder = (best_checkpoint(run.checkpoints) if name == BEST else None) or run.checkpoints / name
    if folder not in folders:
        there = ", ".join(each.name for each in folders) or "none"
        raise ConfigError(f"{run.checkpoints} has no checkpoint {name!r}; it has: {there}")
    return folder, await read(folder)


def _entries(root: Path) -> list[Path]:
    return sorted(root.iterdir()) if root.is_dir() else []
