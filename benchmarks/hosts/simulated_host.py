"""A host in simulated time: GPUs on which acting and learning take turns, and cores for simulators.

    episode ─► observation ─► the next free GPU ─► batch of at most 32 ─► chunk on a core ─► observation ...
                              rows of the update ─► micro-batch, micro-batch, ...

A GPU computes what waits, batch by batch, as a device lane does: after a pass that learns comes one
that acts, if an episode waits. Observations go to any engine of their host. There is one timer of
the loop for each pass, so a pass of many rows costs as little Python as one.
"""

import asyncio
import heapq
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from benchmarks.hosts.measured import BATCH, ChunkTimes, acting_s, learning_s


class _Observation(NamedTuple):
    ready_at: float
    number: int
    left: int
    """Decisions until the end of its episode."""

    on_end: Callable[[], None]


class SimulatedHost:
    """One host.

    Attributes:
        own_cost_s: CPU seconds of the simulation of all hosts, which a real control process does
            not have.
    """

    own_cost_s = 0.0

    def __init__(self, seed: int, num_cores: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._chunks = ChunkTimes(seed)
        self._cores = [0.0] * num_cores
        self._waiting: list[_Observation] = []
        self._gpus: list[SimulatedGpu] = []
        self._timer: asyncio.TimerHandle | None = None
        self._number = 0

    def add_gpu(self, *, acts: bool) -> "SimulatedGpu":
        """Add a GPU that learns, and acts if `acts`."""
        gpu = SimulatedGpu(self if acts else None)
        if acts:
            self._gpus.append(gpu)
        return gpu

    def run_decisions(self, num_decisions: int, on_end: Callable[[], None]) -> None:
        """Run an episode of `num_decisions`; then call `on_end`."""
        self._observe(self._loop.time(), num_decisions, on_end)
        self.wake()

    def wake(self) -> None:
        """Let idle GPUs act; if nothing is ready, come back when the next observation is."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        idle = [gpu for gpu in self._gpus if not gpu.is_computing]
        for gpu in idle:
            if not self.has_ready():
                break
            gpu.go_on()
        if any(not gpu.is_computing for gpu in idle) and self._waiting:
            self._timer = self._loop.call_at(self._waiting[0].ready_at, self.wake)

    def has_ready(self) -> bool:
        """Return whether an observation waits for a policy."""
        return bool(self._waiting) and self._waiting[0].ready_at <= self._loop.time()

    def take_batch(self) -> list[_Observation]:
        """Take the observations that are ready, the oldest first."""
        batch: list[_Observation] = []
        while len(batch) < BATCH and self.has_ready():
            batch.append(heapq.heappop(self._waiting))
        return batch

    def decided(self, batch: Sequence[_Observation]) -> None:
        """Step the simulators of a batch, each on the core that is free first."""
        now, cores = self._loop.time(), self._cores
        for each in batch:
            ends_at = max(now, cores[0]) + self._chunks.next_s()
            heapq.heapreplace(cores, ends_at)
            if each.left > 1:
                self._observe(ends_at, each.left - 1, each.on_end)
            else:
                self._loop.call_at(ends_at, each.on_end)

    def _observe(self, ready_at: float, left: int, on_end: Callable[[], None]) -> None:
        self._number += 1
        heapq.heappush(self._waiting, _Observation(ready_at, self._number, left, on_end))


class SimulatedGpu:
    """One GPU.

    Args:
        host: where its observations come from; None if it only learns.

    Attributes:
        is_computing: whether a pass runs.
        num_acted, num_learned: decisions of all passes that began.
    """

    def __init__(self, host: SimulatedHost | None) -> None:
        self._loop, self._host = asyncio.get_running_loop(), host
        self._passes: deque[int] = deque()
        self._learned: asyncio.Future[None] | None = None
        self.is_computing = self._has_acted = False
        self.num_acted = self.num_learned = 0

    async def learn(self, passes: Sequence[int]) -> None:
        """Compute the micro-batches, given by their numbers of rows."""
        if not passes:
            return
        self._passes.extend(passes)
        self._learned = self._loop.create_future()
        self.go_on()
        await self._learned

    def go_on(self) -> None:
        """Begin the next pass, if none runs and one is due."""
        if self.is_computing:
            return
        host = self._host if self._host is not None and self._host.has_ready() else None
        if self._passes and (self._has_acted or host is None):
            self._has_acted = False
            num_rows = self._passes.popleft()
            self.num_learned += num_rows
            self._begin(learning_s(num_rows), self._end_of_learning)
        elif host is not None:
            self._has_acted = True
            batch = host.take_batch()
            self.num_acted += len(batch)
            self._begin(acting_s(len(batch)), partial(host.decided, batch))

    def _begin(self, seconds: float, on_end: Callable[[], None]) -> None:
        self.is_computing = True
        self._loop.call_later(seconds, self._end, on_end)

    def _end(self, on_end: Callable[[], None]) -> None:
        began = time.thread_time()
        self.is_computing = False
        on_end()
        self.go_on()
        if self._host is not None:
            self._host.wake()
        SimulatedHost.own_cost_s += time.thread_time() - began

    def _end_of_learning(self) -> None:
        if not self._passes and self._learned is not None:
            self._learned.set_result(None)
            self._learned = None
