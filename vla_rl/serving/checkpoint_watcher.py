"""Newer weights for a policy that is being served.

a run's folder       its newest checkpoint, by the update in the name
a policy's folder    read again when its files change

newer? ─► load beside the old policy ─► same shapes and settings? ─► swap, between two batches
   ▲                     └── fails: the old weights stay, and the reason is shown
   └────────── every few seconds
"""

import asyncio
import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

from vla_rl.engines import DeviceLane
from vla_rl.engines.torch_engine import TorchEngine
from vla_rl.errors import CheckpointError
from vla_rl.learner.checkpoint.folders import latest_checkpoint, update_in_name

logger = logging.getLogger(__name__)

WEIGHT_SUFFIXES: Final = frozenset({".safetensors", ".pt", ".bin", ".json"})


class Found(NamedTuple):
    """A policy's folder as it was found."""

    checkpoint: Path
    """Folder of the run or of the policy, in which newer ones are looked for."""

    folder: Path
    version: int
    """The update that a run's checkpoint is named for; the number of reloads of any other folder."""

    files: tuple[tuple[str, int, int], ...]
    """Name, size and time of change (ns) of each file, to notice a newer one."""

    def is_same(self, other: "Found | None") -> bool:
        """Return whether the files are the same, whatever the number of reloads."""
        return other is not None and (self.folder, self.files) == (other.folder, other.files)


def find_policy(checkpoint: Path, reloads: int = 0) -> Found:
    """Return the policy's folder that a run's, a checkpoint's or a policy's own folder names.

    Raises: CheckpointError for a run without a checkpoint.
    """
    root, version, folder = checkpoint / "checkpoints", reloads, checkpoint
    if root.is_dir():
        latest = latest_checkpoint(root)
        if latest is None:
            raise CheckpointError(f"{checkpoint} is a run without a checkpoint, expected one")
        folder = latest
    update = update_in_name(folder.resolve())
    if (folder / "policy").is_dir():
        version, folder = update if update is not None else reloads, folder / "policy"
    return Found(checkpoint, folder, version, _list_files(folder))


def _list_files(folder: Path) -> tuple[tuple[str, int, int], ...]:
    found = []
    for path in sorted(folder.glob("*")):
        if path.suffix in WEIGHT_SUFFIXES:
            status = path.stat()
            found.append((path.name, status.st_size, status.st_mtime_ns))
    return tuple(found)


@dataclasses.dataclass(kw_only=True)
class ReloadState:
    """The weights that act, and why they are not the newest."""

    served: Found
    """The folder whose weights act."""

    failed: Found | None = None
    """The newest folder if it could not be loaded; it is tried again when its files change."""

    error: str | None = None
    """Reason of the failure; None if the newest weights act."""


class CheckpointWatcher:
    """Loads newer weights into an engine.

    Args:
        checkpoint: folder of a run or of a policy.
        load: loads a policy from its folder, in any thread.
        model: the policy that acts; a newer one has to have its settings and shapes.
        engine: acts with it. lane: runs it.
        found: the folder that `model` was loaded from.
    """

    def __init__(
        self,
        checkpoint: Path,
        load: Callable[[Path], Any],
        model: Any,
        engine: TorchEngine,
        lane: DeviceLane,
        found: Found,
    ) -> None:
        self._checkpoint, self._load, self._model = checkpoint, load, model
        self._engine, self._lane = engine, lane
        self._num_reloads = 0
        self.state = ReloadState(served=found)

    async def watch(self, every_s: float) -> None:
        """Look for newer weights until cancelled; 0: never.

        A failure is logged once and kept in `state`.
        """
        if every_s == 0.0:
            await asyncio.Event().wait()
        while True:
            await asyncio.sleep(every_s)
            await self.reload_newer()

    async def reload_newer(self) -> bool:
        """Take newer weights over if there are any; return whether there were."""
        newest: Found | None = None
        try:
            newest = await asyncio.to_thread(find_policy, self._checkpoint, self._num_reloads + 1)
            if newest.is_same(self.state.served):
                self.state = ReloadState(served=self.state.served)  # a damaged newer one is gone
                return False
            if newest.is_same(self.state.failed):
                return False
            await self._take_over(newest)
        # whatever a damaged or half-written folder makes a reader raise: clients are served on
        except Exception as error:
            if self.state.error != str(error):
                logger.warning("the old weights stay: %s", error)
            self.state = ReloadState(served=self.state.served, failed=newest, error=str(error))
            return False
        self._num_reloads += 1
        self.state = ReloadState(served=newest)
        return True

    async def _take_over(self, newest: Found) -> None:
        model = await asyncio.to_thread(self._load, newest.folder)
        if _list_files(newest.folder) != newest.files:
            raise CheckpointError(f"{newest.folder} changed while it was read; it is read again")
        _require_alike(self._model, model, newest.folder)
        # between two batches, so that no reply mixes two versions
        await self._lane.run(
            self._engine.apply_weights, model.network, newest.version, work="reload"
        )


def _require_alike(served: Any, newer: Any, folder: Path) -> None:
    """Raise CheckpointError unless a newer policy has the served one's settings and shapes."""
    if getattr(served, "config", None) != getattr(newer, "config", None):
        raise CheckpointError(
            f"{folder} has other settings than the policy that is served (config.json); start "
            "another server for it"
        )
    shapes, others = (
        [parameter.shape for parameter in model.network.parameters()] for model in (served, newer)
    )
    # compared before anything is copied: an error half way would leave weights of two versions
    if shapes != others:
        raise CheckpointError(f"{folder} has parameters of other shapes than the policy served")
