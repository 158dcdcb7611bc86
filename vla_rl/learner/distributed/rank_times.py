"""Times of the ranks: who computes, who waits for whom.

A `RankClock` times the jobs of one rank's lane, and its collectives. All ranks of a host share the clock
(`time.monotonic`), so that their times are one timeline; those of another host are shifted by the
difference of both clocks, as measured at the start. On a GPU a collective's times are those of its
stream, not of the host, which only submits it.

Every rank makes the same collectives. The rank that comes last to one waits least in it, so the
shortest of the ranks' times is the communication itself, and what another rank's is longer is
waiting for the last one.
"""

import time
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final, TypeAlias, TypeVar

import msgspec
import numpy as np
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultReduceScatter,
)

from vla_rl.graph import Slice

T = TypeVar("T")

Timed: TypeAlias = tuple[str, float, float]
"""Name, begin and end, in seconds of the host's clock."""

MAX_KEPT: Final = 100_000
"""Most jobs, and most collectives, that are kept between two updates."""


class RankTimes(msgspec.Struct, frozen=True):
    """Times of a rank since they were last taken."""

    jobs: list[Timed]
    collectives: list[Timed]
    """Every rank has the same ones in the same order."""

    flops: int = 0
    """Floating-point operations of the passes, if they are counted."""

    def shifted(self, offset_s: float) -> "RankTimes":
        """Return the same on a clock that is ahead by an offset."""
        if offset_s == 0.0:
            return self
        jobs, collectives = (
            [(name, begin + offset_s, end + offset_s) for name, begin, end in timed]
            for timed in (self.jobs, self.collectives)
        )
        return RankTimes(jobs, collectives, self.flops)


class RankClock:
    """Times what one rank does; observes its lane.

    Args:
        device: the rank's device.

    Example:
        RankTimes(jobs=[("update", 10.2, 11.9)], collectives=[("reduce-scatter", 11.4, 11.8)], flops=5_200_000)
    """

    def __init__(self, device: torch.device) -> None:
        self._is_gpu = device.type == "cuda"
        self._jobs: deque[Timed] = deque(maxlen=MAX_KEPT)
        self._collectives: deque[tuple[str, Any, Any]] = deque(maxlen=MAX_KEPT)
        self._set_reference()

    def wrap_job(self, work: str, job: "partial[T]") -> "partial[T]":
        """Return the job, which records its times."""
        return partial(self._run, work, job)

    def time_collectives(self, part: FSDPModule) -> None:
        """Time the collectives of one sharded part."""
        reduce_scatter = _TimedReduceScatter(self)
        part.set_custom_all_gather(_TimedAllGather(self))
        part.set_custom_reduce_scatter(reduce_scatter)
        # after the all-reduce of replicas, which has no such class
        part.set_all_reduce_hook(reduce_scatter.record_all_reduce)

    def mark(self) -> Any:
        """Return this moment of the current stream."""
        if not self._is_gpu:
            return time.monotonic()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def record_collective(self, name: str, started: Any, ended: Any) -> None:
        """Record a collective between two marks."""
        self._collectives.append((name, started, ended))

    def take_times(self) -> RankTimes:
        """Return the times since the last call; on a GPU this waits for it."""
        if self._is_gpu:
            # events have no time before the stream has passed them
            torch.cuda.synchronize()
        collectives = [
            (name, self._seconds(started), self._seconds(ended))
            for name, started, ended in self._collectives
        ]
        taken = RankTimes(list(self._jobs), collectives)
        self._jobs.clear()
        self._collectives.clear()
        self._set_reference()
        return taken

    def _run(self, work: str, job: "partial[T]") -> T:
        started = time.monotonic()
        try:
            return job()
        finally:
            self._jobs.append((work, started, time.monotonic()))

    def _set_reference(self) -> None:
        # anew each time: elapsed_time is a float32 of milliseconds, too coarse after an hour
        self._reference, self._reference_s = self.mark(), time.monotonic()

    def _seconds(self, mark: Any) -> float:
        if not self._is_gpu:
            return float(mark)
        return self._reference_s + 1e-3 * float(self._reference.elapsed_time(mark))


class _TimedAllGather(DefaultAllGather):
    """FSDP's all-gather, timed."""

    def __init__(self, clock: RankClock) -> None:
        self._clock = clock

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        started = self._clock.mark()
        work = super().__call__(*inputs, **options)
        self._clock.record_collective("all-gather", started, self._clock.mark())
        return work


class _TimedReduceScatter(DefaultReduceScatter):
    """FSDP's reduce-scatter and the all-reduce of replicas, timed."""

    def __init__(self, clock: RankClock) -> None:
        self._clock = clock
        self._started: Any = None

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate, and note when: replicas begin their all-reduce soon after."""
        tensor = super().allocate(size, dtype=dtype, device=device)
        self._started = self._clock.mark()
        return tensor

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        started, self._started = self._clock.mark(), None
        work = super().__call__(*inputs, **options)
        self._clock.record_collective("reduce-scatter", started, self._clock.mark())
        return work

    def record_all_reduce(self, _: Tensor) -> None:
        """Record an all-reduce that has just ended, if there was no reduce-scatter."""
        started, self._started = self._started, None
        if started is not None:
            self._clock.record_collective("all-reduce", started, self._clock.mark())


MAX_SLICES: Final = 2000
"""Most collectives of a rank that an update's timeline shows."""


def rank_metrics(
    times: Sequence[RankTimes], seconds: float, peak_flops: float | None
) -> dict[str, float]:
    """Return the metrics by path.

    Args:
        times: times of each rank in an update, by number.
        seconds: duration of the update.
        peak_flops: operations per second of each rank's device; None if it is not known.

    Returns: for each rank `rank/K/compute_s`, the time of its passes without collectives;
    `rank/K/wait_s`, its waiting for other ranks; `rank/K/awaited_s`, the waiting of all others for
    it; `rank/K/mfu` if the peak is known. `ranks/communication_share` is the share of the update in
    collectives without waiting, `ranks/wait_share` the mean waiting of a rank as a share of the update.
    """
    lengths = np.array(
        [[end - begin for _, begin, end in each.collectives] for each in times], dtype=np.float64
    )
    least = lengths.min(axis=0)
    waits = lengths - least
    last = lengths.argmin(axis=0)
    metrics: dict[str, float] = {}
    for rank, each in enumerate(times):
        busy = sum(end - begin for _, begin, end in each.jobs)
        metrics[f"rank/{rank}/compute_s"] = max(busy - float(lengths[rank].sum()), 0.0)
        metrics[f"rank/{rank}/wait_s"] = float(waits[rank].sum())
        metrics[f"rank/{rank}/awaited_s"] = float(waits[:, last == rank].sum())
        if peak_flops is not None:
            metrics[f"rank/{rank}/mfu"] = each.flops / (seconds * peak_flops)
    metrics["ranks/communication_share"] = float(least.sum()) / seconds
    metrics["ranks/wait_share"] = float(waits.sum(axis=1).mean()) / seconds
    return metrics


def rank_slices(*parts: Sequence[RankTimes]) -> Mapping[str, tuple[Slice, ...]]:
    """Return the timeline of each rank, and of its collectives, by the name of its lane.

    Args:
        parts: times of each rank, by number, one part after another.
    """
    lanes: dict[str, tuple[Slice, ...]] = {}
    for rank, times in enumerate(zip(*parts, strict=True)):
        jobs = [Slice(*job) for each in times for job in each.jobs]
        collectives = [Slice(*made) for each in times for made in each.collectives]
        lanes[f"rank {rank}"] = tuple(jobs)
        lanes[f"rank {rank}, collectives"] = tuple(collectives[:MAX_SLICES])
    return lanes


def describe_ranks(metrics: Mapping[str, float]) -> str:
    """Describe who waits for whom in a few words; nothing without ranks."""
    awaited = {
        name.split("/")[1]: seconds
        for name, seconds in metrics.items()
        if name.startswith("rank/") and name.endswith("/awaited_s")
    }
    if not awaited:
        return ""
    rank = max(awaited, key=lambda rank: awaited[rank])
    shares = [metrics[f"ranks/{what}_share"] for what in ("wait", "communication")]
    return f"ranks wait {shares[0]:.0%}, mostly for rank {rank}; communication {shares[1]:.0%}"
