"""The checkpoints of a run: when they are due, how they are written, how a full disk delays them.

    node `checkpoint`: prepare ─► line of the update in metrics.jsonl ─► commit
                       (all bytes)                                      (a rename)

A checkpoint appears only after the metrics of all its updates are on disk, in metrics.jsonl or in
the checkpoint itself. Therefore a run that is killed at any instant and resumed has a line for
every update.
"""

import logging
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import msgspec

from vla_rl.actors.completion import run_to_its_end
from vla_rl.errors import CheckpointError
from vla_rl.learner import PreparedCheckpoint, TeamState, prepare_checkpoint
from vla_rl.learner.checkpoint_folders import newest_name, prune

logger = logging.getLogger(__name__)


class RunSnapshot(msgspec.Struct, frozen=True):
    """The complete state of a run, taken at one instant."""

    learner: TeamState
    others: dict[str, Any]
    """States of the scheduler and of other parts, by name."""


class CheckpointSaver:
    """Saves checkpoints during a run.

    If one cannot be written, this is reported and tried again after each update.

    Args:
        every: updates between checkpoints.
        keep_last: number of checkpoints to keep.
        saved_version: update that the run resumes from.
    """

    def __init__(self, every: int, keep_last: int, saved_version: int) -> None:
        self._every, self._keep_last = every, keep_last
        self.saved_version = saved_version
        """Newest update that is on disk."""
        self._root: Path | None = None
        self._unwritten: Callable[[], bytes] = bytes
        self._is_wanted: Callable[[int], bool] = lambda version: False
        self._kept: Callable[[], Collection[int]] = tuple
        self._prepared: dict[int, PreparedCheckpoint] = {}
        self._is_overdue = False

    def open(self, root: Path, unwritten: Callable[[], bytes]) -> None:
        """Prepare to save below `root`.

        `unwritten` returns the lines of metrics that found no room in their file; they are saved
        too.
        """
        self._root, self._unwritten = root, unwritten

    def also_save(self, is_due: Callable[[int], bool], kept: Callable[[], Collection[int]]) -> None:
        """Save checkpoints for another reader, too, and keep them as long as it needs them.

        Args:
            is_due: returns whether the reader wants a checkpoint of an update.
            kept: returns the updates whose checkpoints it still needs.
        """
        self._is_wanted, self._kept = is_due, kept

    def is_due(self, version: int) -> bool:
        """Return whether a checkpoint of this update is due."""
        return self._is_overdue or version % self._every == 0 or self._is_wanted(version)

    async def prepare(self, snapshot: RunSnapshot) -> None:
        """Write a checkpoint except for the final rename, which `commit` does.

        If the disk is full, log a warning.
        """
        try:
            self._prepared[snapshot.learner.weight_version] = await self._prepare(snapshot)
        except CheckpointError as error:
            self._postpone(error)

    async def commit(self, version: int) -> None:
        """Make the checkpoint of an update visible, if one was prepared.

        If the disk is full, log a warning.
        """
        prepared = self._prepared.pop(version, None)
        if prepared is None:
            return
        try:
            await self._commit(prepared, version)
        except CheckpointError as error:
            self._postpone(error)

    async def save(self, snapshot: RunSnapshot) -> Path:
        """Save a checkpoint now. Raises: CheckpointError; older checkpoints remain."""
        await self.discard()
        return await self._commit(await self._prepare(snapshot), snapshot.learner.weight_version)

    async def discard(self) -> None:
        """Remove checkpoints that were prepared and never committed."""
        while self._prepared:
            _, prepared = self._prepared.popitem()
            await prepared.discard()

    async def prune(self) -> None:
        """Remove the checkpoints that were kept for another reader and are not needed any more."""
        assert self._root is not None
        await run_to_its_end(prune, self._root, self._keep_last, self._kept())

    async def _prepare(self, snapshot: RunSnapshot) -> PreparedCheckpoint:
        assert self._root is not None
        return await prepare_checkpoint(self._root, snapshot.learner, snapshot.others)

    async def _commit(self, prepared: PreparedCheckpoint, version: int) -> Path:
        # lines that find no room on a full disk travel in the checkpoint, so none is ever missing
        unwritten = await run_to_its_end(self._unwritten)
        folder = await prepared.commit(
            keep_last=self._keep_last, keep=self._kept(), metrics=unwritten
        )
        if self._is_overdue:
            logger.warning("checkpoints can be written again: %s", folder)
        self.saved_version, self._is_overdue = version, False
        return folder

    def _postpone(self, error: CheckpointError) -> None:
        if not self._is_overdue:
            assert self._root is not None
            newest = newest_name(self._root)
            logger.warning(
                "%s The newest checkpoint is: %s. It is tried again after each update",
                error,
                newest,
            )
        self._is_overdue = True
