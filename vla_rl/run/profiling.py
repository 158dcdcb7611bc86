"""A profile of chosen updates by torch's profiler: every operator of the device lane, on the CPU and
on the GPU, under the name of the node that asked for it.

The profiler is started and stopped on the lane's own thread, because it sees the thread that starts
it and the ones that torch starts from there.
"""

import asyncio
import logging
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from vla_rl.engines import DeviceLane
from vla_rl.graph.current_node import CURRENT_NODE

T = TypeVar("T")

_log = logging.getLogger(__name__)

OF_ENGINES: Final = frozenset({"act", "generate"})
"""Work that serves the episodes of every node."""


class UpdateProfiler:
    """Profiles some updates of a run, and writes one trace for ui.perfetto.dev.

    Args:
        lane: the lane whose work is profiled.
        updates: numbers of the updates, from 1.
        folder: folder of the trace.
    """

    def __init__(self, lane: DeviceLane, updates: range, folder: Path) -> None:
        self._lane, self._updates, self._folder = lane, updates, folder
        self._running: profile | None = None

    async def before(self, update: int) -> None:
        """Begin, if `update` is the first of the updates; it may have begun to run episodes."""
        if self._running is None and update in self._updates:
            activities = [ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(ProfilerActivity.CUDA)
            self._running = profile(activities=activities, record_shapes=True)
            await self._lane.run(self._running.start, work="profile")
            self._lane.observe(self)

    async def after(self, update: int) -> None:
        """Write the trace, if `update` was the last of the updates."""
        if update >= self._updates.stop - 1:
            await self.close()

    async def close(self) -> None:
        """Write what was profiled so far, if anything."""
        profiled, self._running = self._running, None
        if profiled is None:
            return
        self._lane.forget(self)
        await self._lane.run(profiled.stop, work="profile")
        path = self._folder / f"profile-{self._updates.start:06d}-{self._updates.stop - 1:06d}.json"
        try:
            await asyncio.to_thread(profiled.export_chrome_trace, str(path))
        except (OSError, RuntimeError) as error:
            # like every other file of a run: a full disk does not end it
            _log.warning("the profile %s could not be written: %s", path, error)
            return
        print(f"profile of updates {self._updates.start} to {self._updates.stop - 1}: {path}")

    def watched(self, work: str, job: "partial[T]") -> "partial[T]":
        """Return the job under the name of the node that submits it, or of the engine's work."""
        # an engine's task outlives the node whose episode asked it first
        node = None if work in OF_ENGINES else CURRENT_NODE.get()
        return partial(_named, work if node is None else f"{node}: {work}", job)


def _named(name: str, job: "partial[T]") -> T:
    with record_function(name):
        return job()
