"""Resume a run from its newest complete checkpoint, from a named one, or from its beginning."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

from vla_rl.engines.atomic_folder import MANIFEST
from vla_rl.errors import CheckpointError, ConfigError
from vla_rl.evaluation.held_out import Judge
from vla_rl.learner import Checkpoint, load_checkpoint, verify_checkpoint
from vla_rl.learner.checkpoint import read_part
from vla_rl.learner.checkpoint_folders import (
    BEST,
    best_checkpoint,
    incomplete_checkpoints,
    list_checkpoints,
    renamed_checkpoints,
    set_incomplete_aside,
    set_newer_aside,
)
from vla_rl.reporting import RunDirectory
from vla_rl.rollout.episode_book import SchedulerState

T = TypeVar("T")

SCHEDULER: Final = "scheduler"
"""Name of the scheduler's part of a checkpoint."""


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
    incomplete = incomplete_checkpoints(run.checkpoints)
    if folders:
        for folder in incomplete:
            print(f"{folder} is not used: it has no {MANIFEST}, so it is not complete", flush=True)
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
    if complaints or incomplete:
        raise CheckpointError(
            f"{run.checkpoints} holds no complete checkpoint, so there is nothing to resume from: "
            + " ".join(complaints or [f"{path.name} is not complete." for path in incomplete])
        )
    return None


async def load_resumable(folder: Path) -> Checkpoint:
    """Load a checkpoint with what a resume needs first: weights, and the scheduler's state of the
    same update.

    Raises: CheckpointError if it is damaged.
    """
    checkpoint = await load_checkpoint(folder)
    state = await asyncio.to_thread(checkpoint.part, SCHEDULER, SchedulerState)
    _require_version(folder, state, checkpoint.state.weight_version)
    return checkpoint


async def verify_resumable(folder: Path) -> int:
    """Check as `load_resumable` does, without loading weights; return the weight version."""
    version = await verify_checkpoint(folder)
    _require_version(folder, await read_part(folder, SCHEDULER, SchedulerState), version)
    return version


def _require_version(folder: Path, state: SchedulerState, version: int) -> None:
    if state.version != version:
        raise CheckpointError(
            f"the scheduler's state in {folder} is of update {state.version}, expected {version} as "
            "its weights; the checkpoint is damaged."
        )


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
        for set_aside in (set_incomplete_aside, partial(set_newer_aside, folder=folder)):
            for moved in await asyncio.to_thread(set_aside, run.checkpoints):
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
