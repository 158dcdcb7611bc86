"""Times of one rank: the jobs of its lane, and its collectives.

All ranks of a host share the clock (`time.monotonic`), so that their times are one timeline; those
of another host are shifted by the difference of both clocks, as measured at the start. On a
GPU a collective's times are those of its stream, not of the host, which only submits it.
"""

import time
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any, Final, TypeAlias, TypeVar

import msgspec
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultReduceScatter,
)

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
    """

    def __init__(self, device: torch.device) -> None:
        self._is_gpu = device.type == "cuda"
        self._jobs: deque[Timed] = deque(maxlen=MAX_KEPT)
        self._collectives: deque[tuple[str, Any, Any]] = deque(maxlen=MAX_KEPT)
        self._set_reference()

    def watched(self, work: str, job: "partial[T]") -> "partial[T]":
        """Return the job, which notes its times."""
        return partial(self._run, work, job)

    def watch(self, part: FSDPModule) -> None:
        """Time the collectives of one sharded part."""
        reduce_scatter = _TimedReduceScatter(self)
        part.set_custom_all_gather(_TimedAllGather(self))
        part.set_custom_reduce_scatter(reduce_scatter)
        # after the all-reduce of replicas, which has no such class
        part.set_all_reduce_hook(reduce_scatter.note_all_reduce)

    def mark(self) -> Any:
        """Return this moment of the current stream."""
        if not self._is_gpu:
            return time.monotonic()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def note(self, name: str, begun: Any, ended: Any) -> None:
        """Note a collective between two marks."""
        self._collectives.append((name, begun, ended))

    def take(self) -> RankTimes:
        """Return the times since the last call; on a GPU this waits for it."""
        if self._is_gpu:
            torch.cuda.synchronize()
        collectives = [
            (name, self._seconds(begun), self._seconds(ended))
            for name, begun, ended in self._collectives
        ]
        taken = RankTimes(list(self._jobs), collectives)
        self._jobs.clear()
        self._collectives.clear()
        self._set_reference()
        return taken

    def _run(self, work: str, job: "partial[T]") -> T:
        begun = time.monotonic()
        try:
            return job()
        finally:
            self._jobs.append((work, begun, time.monotonic()))

    def _set_reference(self) -> None:
        # anew each time: elapsed_time is a float32 of milliseconds, too coarse after an hour
        self._reference, self._reference_s = self.mark(), time.monotonic()

    def _seconds(self, mark: Any) -> float:
        if not self._is_gpu:
            return float(mark)
        return self._reference_s + 1e-3 * float(self._reference.elapsed_time(mark))


class _TimedAllGather(DefaultAllGather):
    """FSDP's all-gather with a note of its times."""

    def __init__(self, clock: RankClock) -> None:
        self._clock = clock

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        begun = self._clock.mark()
        work = super().__call__(*inputs, **options)
        self._clock.note("all-gather", begun, self._clock.mark())
        return work


class _TimedReduceScatter(DefaultReduceScatter):
    """FSDP's reduce-scatter with a note of its times, and of the all-reduce of replicas."""

    def __init__(self, clock: RankClock) -> None:
        self._clock = clock
        self._begun: Any = None

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate, and note when: replicas begin their all-reduce soon after."""
        tensor = super().allocate(size, dtype=dtype, device=device)
        self._begun = self._clock.mark()
        return tensor

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        begun, self._begun = self._clock.mark(), None
        work = super().__call__(*inputs, **options)
        self._clock.note("reduce-scatter", begun, self._clock.mark())
        return work

    def note_all_reduce(self, _: Tensor) -> None:
        """Note an all-reduce that has just ended, if there was no reduce-scatter."""
        begun, self._begun = self._begun, None
        if begun is not None:
            self._clock.note("all-reduce", begun, self._clock.mark())
