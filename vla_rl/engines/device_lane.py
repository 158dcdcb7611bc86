"""Use of one device by everything in a process: a single thread computes on it.

    inference ──┐ run(fn)                                   prepare(fn) ┌── observations to batches
    learning  ──┴─► FIFO ─► device thread: one at a time    host thread ◄┘   (resizing, tokenising)

Every user of the device submits small pieces of work (one inference batch, one micro-batch) and
awaits each before the next. This makes first come, first served fair: between two micro-batches of
an update, every waiting inference batch gets its turn. A piece is atomic: no other piece runs at
the same time, and cancelling the `await` does not stop it.

`to_device` and `to_host` copy so that the host waits as rarely as possible: to the device from pinned
memory, queued behind the device's work; to the host all tensors in one copy. On a CPU nothing is copied.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import CancelledError as NeverStarted, Future, ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import Protocol, Self, TypeVar, TypeVarTuple

import torch
from torch import Tensor

from vla_rl.util.tasks import run_in_thread

T = TypeVar("T")
S = TypeVar("S")
Ts = TypeVarTuple("Ts")

_log = logging.getLogger(__name__)


class LaneObserver(Protocol):
    """Looks at the jobs of a lane: counts them, or gives them names."""

    def wrap_job(self, work: str, job: "partial[T]") -> "partial[T]":
        """Return a job that does the same; called on the loop, in the task that submits it."""
        ...


class DeviceLane:
    """Serialises all use of one device; leaving its `async with` block waits for the running work.

    Args:
        num_threads: torch's CPU threads inside the lane; None keeps torch's default. With one
            thread, results do not depend on the machine's number of cores.
        name: prefix of the threads' names.
    """

    def __init__(self, num_threads: int | None = None, name: str = "device") -> None:
        if num_threads is not None and num_threads < 1:
            raise ValueError(
                f"num_threads is {num_threads}, expected at least 1, or None for "
                "torch's own choice."
            )
        self._device = ThreadPoolExecutor(1, f"{name}-lane", _use_threads, (num_threads,))
        self._host = ThreadPoolExecutor(1, f"{name}-host", _use_threads, (1,))
        self._busy_s: dict[str, float] = {}
        self._observers: list[LaneObserver] = []
        self._opened_at = time.perf_counter()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def run(self, fn: Callable[[*Ts], T], *args: *Ts, work: str = "other") -> T:
        """Run `fn(*args)` on the device thread, after all earlier submissions.

        Its time is counted as `work`.

        If it is cancelled before its turn, it never runs; if it is cancelled while it runs, it runs
        to its end, and an error is logged.
        """
        job = partial(fn, *args)
        for observer in self._observers:
            job = observer.wrap_job(work, job)
        return await self._await(self._device.submit(self._timed, work, job))

    def add_observer(self, observer: LaneObserver) -> None:
        """Show all later jobs to `observer`."""
        self._observers.append(observer)

    def remove_observer(self, observer: LaneObserver) -> None:
        """Show jobs to `observer` no longer."""
        self._observers.remove(observer)

    async def prepare(self, fn: Callable[[*Ts], T], *args: *Ts) -> T:
        """Run `fn(*args)` on the host thread, to prepare inputs for the device.

        `fn` may copy to the device and compute on the copies, at the same time as the lane; it must
        not touch what the lane computes with, such as weights.
        """
        return await self._await(self._host.submit(fn, *args))

    async def prepare_ahead(
        self, fn: Callable[[S], T], inputs: Sequence[S]
    ) -> AsyncGenerator[tuple[S, T], None]:
        """Yield every input with `fn(input)`, in order.

        The next one is prepared while the caller uses the current one.

        Use it inside `contextlib.aclosing`, so that leaving early discards the input prepared
        ahead.
        """
        ahead = self._host.submit(fn, inputs[0]) if inputs else None
        try:
            for index, value in enumerate(inputs):
                assert ahead is not None
                result = await self._await(ahead)
                ahead = (
                    self._host.submit(fn, inputs[index + 1]) if index + 1 < len(inputs) else None
                )
                yield value, result
        finally:
            if ahead is not None:
                ahead.cancel()

    def busy_seconds(self) -> dict[str, float]:
        """Seconds that the device thread has worked since it was opened, by kind of work."""
        return dict(self._busy_s)

    def busy_share(self) -> float:
        """Share of the time since it was opened in which the device thread worked."""
        return sum(self._busy_s.values()) / max(time.perf_counter() - self._opened_at, 1e-9)

    async def close(self) -> None:
        """Reject new work, drop work that has not started, and wait for the running work."""
        for executor in (self._device, self._host):
            await run_in_thread(_shut_down, executor)

    def _timed(self, work: str, job: Callable[[], T]) -> T:
        started = time.perf_counter()
        try:
            return job()
        finally:
            self._busy_s[work] = self._busy_s.get(work, 0.0) + time.perf_counter() - started

    async def _await(self, future: Future[T]) -> T:
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            future.add_done_callback(_log_unawaited_error)
            raise


def _use_threads(num_threads: int | None) -> None:
    # torch keeps this number per thread, so set it in the thread that computes
    if num_threads is not None:
        torch.set_num_threads(num_threads)


def _shut_down(executor: ThreadPoolExecutor) -> None:
    executor.shutdown(wait=True, cancel_futures=True)


def _log_unawaited_error(future: Future[T]) -> None:
    try:
        error = future.exception()
    except NeverStarted:
        return
    if error is not None:
        _log.error("work on the device failed after its caller was cancelled", exc_info=error)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor of the host to a device without waiting; return it as it is if it is there."""
    if tensor.device.type != "cpu":
        return tensor.to(device)
    if device.type == "cuda":
        # from pageable memory, CUDA would first finish all work that is queued before the copy
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def to_host(*tensors: Tensor) -> list[Tensor]:
    """Copy tensors of one device to the host in one copy, for which the host waits once."""
    if all(tensor.device.type == "cpu" for tensor in tensors):
        return list(tensors)
    # bytes, so that numbers of several types travel together and arrive unchanged
    flat = [tensor.detach().reshape(-1).view(torch.uint8) for tensor in tensors]
    pieces = torch.split(torch.cat(flat).cpu(), [len(part) for part in flat])
    return [
        # cloned: a piece may start at an address that does not suit its type
        piece.clone().view(tensor.dtype).view(tensor.shape)
        for piece, tensor in zip(pieces, tensors, strict=True)
    ]
