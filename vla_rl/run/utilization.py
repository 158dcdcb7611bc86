"""Model FLOPs utilization (MFU): the arithmetic of a run's passes, as a share of what the device
could have done in the same time (Chowdhery et al. 2022, arXiv:2204.02311, appendix B).

Counted is what the passes compute, recomputation included, by torch's counter; memory copies, the
optimizer and idle time count as nothing.
"""

import time
from collections.abc import Mapping
from typing import Final

from vla_rl.engines import DeviceLane
from vla_rl.engines.flops import FlopMeter
from vla_rl.engines.peaks import TERA
from vla_rl.graph import NodeType, TaskGraph

WORK_OF: Final[Mapping[NodeType, str]] = {
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
        self._lane, self._peak, self._meter = lane, peak_flops, FlopMeter()
        lane.observe(self._meter)
        self._before = (time.perf_counter(), dict[str, int](), lane.busy_seconds())

    def metrics(self) -> dict[str, float]:
        """Return the MFU since the last call: of all time, and of each kind of work while it ran."""
        now, flops, busy = time.perf_counter(), self._meter.flops(), self._lane.busy_seconds()
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
            if count and worked > 0.0:
                metrics[f"device/mfu_{work}"] = count / (worked * self._peak)
        return metrics


def facts_of_nodes(graph: TaskGraph, metrics: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Return the MFU of the nodes that act and train, for the trace."""
    facts = {}
    for node_id, node in graph.nodes.items():
        mfu = metrics.get(f"device/mfu_{WORK_OF.get(node.node_type, '')}")
        if mfu is not None:
            facts[node_id] = {"mfu": round(mfu, 4)}
    return facts
