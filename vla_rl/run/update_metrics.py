"""Measurements of each update of a run: metrics of all parts, use of the device, a profile.

learner's report ─┐
metrics of nodes ─┼► metrics of the update       the later of two equal names counts
parts, device ────┘
"""

import asyncio
import logging
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from vla_rl.engines import DeviceLane
from vla_rl.graph import NodeType, TaskGraph, Update
from vla_rl.graph.node_run import CURRENT_NODE
from vla_rl.learner import UpdateReport
from vla_rl.learner.flops import TERA, LaneFlopCounter
from vla_rl.pipelines.config import LearningConfig
from vla_rl.run.estimates import device_name, peak_of_run
from vla_rl.run.parts import TrainingParts


class UpdateMetrics:
    """Measures the updates of one run, and from now on the arithmetic of its device.

    Args:
        config: settings of the run.
        parts: parts of the run, whose learner has not started.
        num_restarts: how often the run was restarted before.
    """

    def __init__(self, config: LearningConfig, parts: TrainingParts, num_restarts: int) -> None:
        self._config, self._parts, self._num_restarts = config, parts, num_restarts
        self._utilization: Utilization | None = None
        peak = peak_of_run(config.run, device_name(parts.device))
        # ranks compute in processes of their own, whose arithmetic this lane does not see
        if peak is not None and config.learner.ranks == 1:
            self._utilization = Utilization(parts.lane, peak.flops)
        elif peak is not None:
            parts.learner.count_flops(peak.flops)

    def report_of(self, update: Update) -> UpdateReport | None:
        """Return the learner's report of an update; None if the update was cut short before."""
        report = self._parts.learn.last_report
        return report if report and report.weight_version == update.index + 1 else None

    async def measure(self, update: Update) -> dict[str, float]:
        """Return the metrics of an update that has just ended. Call it once for each."""
        parts, report = self._parts, self.report_of(update)
        lag = await parts.runtime.loop_lag()
        return {
            # an update that was cut short lacks them
            **(report.metrics if report is not None else {}),
            **update.metrics,
            **parts.metrics(),
            **self._restarts(),
            **{f"time/node/{node}_s": span.busy_s for node, span in update.spans.items()},
            **(self._utilization.metrics() if self._utilization is not None else {}),
            "time/update_s": update.duration_s,
            "time/device_busy_share": parts.lane.busy_share(),
            "time/loop_lag_p99_s": lag.p99_s,
            "time/loop_lag_max_s": lag.max_s,
        }

    def _restarts(self) -> dict[str, float]:
        has_ranks = self._config.learner.ranks > 1 or self._num_restarts > 0
        return {"learner/restarts": float(self._num_restarts)} if has_ranks else {}


WORK_BY_NODE: Final[Mapping[NodeType, str]] = {
    NodeType.ENV_INTERACT: "act",
    NodeType.MODEL_TRAIN: "update",
}
"""Kinds of work on the device lane that nodes of a type are there for."""


class Utilization:
    """Measures MFU between two updates.

    Args:
        lane: the device lane.
        peak_flops: operations per second of the device; of all of them together, if there are
            several.
    """

    def __init__(self, lane: DeviceLane, peak_flops: float) -> None:
        self._lane, self._peak, self._counter = lane, peak_flops, LaneFlopCounter()
        lane.add_observer(self._counter)
        # the lane may have worked before, for an evaluation of the first weights
        self._before = (time.perf_counter(), dict[str, int](), lane.busy_seconds())

    def metrics(self) -> dict[str, float]:
        """Return the MFU since the last call: of all time, and of each kind of work while it ran."""
        now, flops, busy = time.perf_counter(), self._counter.flops(), self._lane.busy_seconds()
        then, flops_before, busy_before = self._before
        self._before = (now, flops, busy)
        done = {work: count - flops_before.get(work, 0) for work, count in flops.items()}
        total, seconds = sum(done.values()), max(now - then, 1e-9)
        metrics = {
            "device/mfu": total / (seconds * self._peak),
            "device/tflops_per_s": total / seconds / TERA,
        }
        for work, count in done.items():
            worked = busy.get(work, 0.0) - busy_before.get(work, 0.0)
            # work without counted operations, such as a copy of weights, has no MFU
            if count and worked > 0.0:
                metrics[f"device/mfu_{work}"] = count / (worked * self._peak)
        return metrics


def node_facts(graph: TaskGraph, metrics: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Return the MFU of the nodes that act and train, for the trace."""
    facts = {}
    for node_id, node in graph.nodes.items():
        mfu = metrics.get(f"device/mfu_{WORK_BY_NODE.get(node.node_type, '')}")
        if mfu is not None:
            facts[node_id] = {"mfu": round(mfu, 4)}
    return facts


T = TypeVar("T")

_log = logging.getLogger(__name__)

ENGINE_WORK: Final = frozenset({"act", "generate"})
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
            # shapes too, as a slow operation is often a slow shape of a fast one
            activities = [ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(ProfilerActivity.CUDA)
            self._running = profile(activities=activities, record_shapes=True)
            await self._lane.run(self._running.start, work="profile")
            self._lane.add_observer(self)

    async def after(self, update: int) -> None:
        """Write the trace, if `update` was the last of the updates."""
        if update >= self._updates.stop - 1:
            await self.close()

    async def close(self) -> None:
        """Write what was profiled so far, if anything."""
        profiled, self._running = self._running, None
        if profiled is None:
            return
        # first, so that no job of the next update gets a name in a trace that has ended
        self._lane.remove_observer(self)
        await self._lane.run(profiled.stop, work="profile")
        path = self._folder / f"profile-{self._updates.start:06d}-{self._updates.stop - 1:06d}.json"
        try:
            await asyncio.to_thread(profiled.export_chrome_trace, str(path))
        except (OSError, RuntimeError) as error:
            # like every other file of a run: a full disk does not end it
            _log.warning("the profile %s could not be written: %s", path, error)
            return
        print(f"profile of updates {self._updates.start} to {self._updates.stop - 1}: {path}")

    def wrap_job(self, work: str, job: "partial[T]") -> "partial[T]":
        """Return the job under the name of the node that submits it, or of the engine's work."""
        # an engine's task outlives the node whose episode asked it first
        node = None if work in ENGINE_WORK else CURRENT_NODE.get()
        return partial(_run_named, work if node is None else f"{node}: {work}", job)


def _run_named(name: str, job: "partial[T]") -> T:
    with record_function(name):
        return job()
