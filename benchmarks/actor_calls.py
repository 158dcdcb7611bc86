"""A small call to an actor in a child process and back (7 floats in, 9 floats out), against raw
ZeroMQ and Ray.

`python -m benchmarks.actor_calls [--rounds 25] [--without-ray]`; the last line is JSON:

    latency_vs_zmq, latency_vs_ray   our median time of one call at a time, over theirs
    rate64_vs_zmq, rate64_vs_ray     our calls per second with 64 in flight, over theirs
    cpu64_vs_zmq                     our CPU time per call with 64 in flight, parent and child together, over theirs
    uvloop_floor_vs_zmq              the same two sockets, the caller's driven by uvloop: its median time, over theirs
    latency_vs_uvloop_floor          ours over that: the cost of types, deadlines, cancellation and liveness

Raw ZeroMQ is a pair of blocking DEALER sockets over ipc in two processes that send the same bytes
untyped; ours adds types, deadlines, cancellation and liveness. All take turns, round after round; a
ratio is the median of the rounds' ratios.
"""

import argparse
import asyncio
import logging
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import psutil
import uvloop
import zmq

from benchmarks.interleaved import (
    Samples,
    medians_of,
    print_json_line,
    print_table,
    ratio_of,
    sample_in_turn,
)
from vla_rl.actors import Actor, ChildProcess, Runtime

IN_FLIGHT = 64
ACTION = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7]
ANSWER = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0]


class Stepper(Actor):
    """Answers at once, like a simulator without physics."""

    async def step(self, action: list[float]) -> list[float]:
        """Return nine floats for seven."""
        return ANSWER


class CpuClock:
    """CPU time of this process and one other."""

    def __init__(self, other_pid: int) -> None:
        self._processes = [psutil.Process(), psutil.Process(other_pid)]

    def read_s(self) -> float:
        """Return user and system time so far."""
        times = [process.cpu_times() for process in self._processes]
        return float(sum(entry.user + entry.system for entry in times))


class Ours:
    """An actor in a child process, called from uvloop."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        self._runtime = Runtime()
        self.cpu_us: list[float] = []

    def __enter__(self) -> Self:
        self._runner.run(self._open())
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._runner.run(self._wait_closed())
        self._runner.close()

    def latency_us(self, calls: int = 600) -> float:
        """Median of one call at a time."""
        return self._runner.run(self._one_at_a_time(calls))

    def rate(self, calls: int = 8_000) -> float:
        """Calls per second with 64 in flight."""
        cpu, began = self._clock.read_s(), time.perf_counter()
        self._runner.run(self._in_flight(calls))
        rate = calls / (time.perf_counter() - began)
        self.cpu_us.append((self._clock.read_s() - cpu) / calls * 1e6)
        return rate

    async def _open(self) -> None:
        self._stop = asyncio.Event()
        opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._owner = asyncio.create_task(self._own(opened))
        await asyncio.wait([self._owner, opened], return_when=asyncio.FIRST_COMPLETED)
        if self._owner.done():
            self._owner.result()

    async def _own(self, opened: "asyncio.Future[None]") -> None:
        async with self._runtime as runtime:
            self._actor = await runtime.spawn(
                Stepper, placement=ChildProcess(), deadline_s=30.0, mailbox=IN_FLIGHT
            )
            self._clock = CpuClock(runtime.info(self._actor).pid)
            opened.set_result(None)
            await self._stop.wait()

    async def _wait_closed(self) -> None:
        await self._owner

    async def _one_at_a_time(self, calls: int) -> float:
        times = []
        for _ in range(calls):
            began = time.perf_counter()
            await self._actor.step(ACTION)
            times.append(time.perf_counter() - began)
        return statistics.median(times) * 1e6

    async def _in_flight(self, calls: int) -> None:
        async def caller() -> None:
            for _ in range(calls // IN_FLIGHT):
                await self._actor.step(ACTION)

        async with asyncio.TaskGroup() as group:
            for _ in range(IN_FLIGHT):
                group.create_task(caller())


class RawZeroMQ:
    """Two blocking DEALER sockets over ipc."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="vla_rl-bench-")
        self._address = f"ipc://{Path(self._folder.name) / 'peer'}"
        self.cpu_us: list[float] = []

    def __enter__(self) -> Self:
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.RCVTIMEO, 30_000)
        self.socket.bind(self._address)
        self._peer = multiprocessing.get_context("spawn").Process(
            target=_echo, args=(self._address,), daemon=True
        )
        self._peer.start()
        assert self._peer.pid is not None
        self.socket.send(b"x" * 56)
        self.socket.recv()
        self._clock = CpuClock(self._peer.pid)
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.send(b"")
        self._peer.join()
        self.socket.close(linger=0)
        self._context.term()
        self._folder.cleanup()

    def latency_us(self, calls: int = 600) -> float:
        """Median of one call at a time."""
        socket, message, times = self.socket, b"x" * 56, []
        for _ in range(calls):
            began = time.perf_counter()
            socket.send(message)
            socket.recv()
            times.append(time.perf_counter() - began)
        return statistics.median(times) * 1e6

    def rate(self, calls: int = 20_000) -> float:
        """Calls per second with 64 in flight."""
        socket, message = self.socket, b"x" * 56
        cpu, began = self._clock.read_s(), time.perf_counter()
        for _ in range(IN_FLIGHT):
            socket.send(message)
        for _ in range(calls - IN_FLIGHT):
            socket.recv()
            socket.send(message)
        for _ in range(IN_FLIGHT):
            socket.recv()
        rate = calls / (time.perf_counter() - began)
        self.cpu_us.append((self._clock.read_s() - cpu) / calls * 1e6)
        return rate


class BareUvloop:
    """The caller's socket on uvloop by its descriptor, one future for each message; the other end
    is that of raw ZeroMQ.

    This is the cost for any caller with an event loop, before any semantics of calls.
    """

    def __init__(self) -> None:
        self._raw = RawZeroMQ()
        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)

    def __enter__(self) -> Self:
        self._raw.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._runner.close()
        self._raw.__exit__(*error)

    def latency_us(self, calls: int = 600) -> float:
        """Return the median time of one message at a time."""
        return self._runner.run(self._one_at_a_time(calls))

    async def _one_at_a_time(self, calls: int) -> float:
        loop, socket, message, times = asyncio.get_running_loop(), self._raw.socket, b"x" * 56, []
        answer: asyncio.Future[bytes] = loop.create_future()

        def look() -> None:
            if not answer.done() and int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                answer.set_result(socket.recv(zmq.NOBLOCK))

        descriptor = int(socket.getsockopt(zmq.FD))
        loop.add_reader(descriptor, look)
        for _ in range(calls):
            answer = loop.create_future()
            began = time.perf_counter()
            socket.send(message)
            loop.call_soon(look)  # sending may have consumed the notification
            await answer
            times.append(time.perf_counter() - began)
        loop.remove_reader(descriptor)
        return statistics.median(times) * 1e6


def _echo(address: str) -> None:
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.connect(address)
    answer = b"y" * 72
    while socket.recv():
        socket.send(answer)
    socket.close(linger=0)
    context.term()


class Ray:
    """An awaited Ray actor."""

    def __enter__(self) -> Self:
        import ray

        self._ray = ray
        ray.init(
            num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR
        )
        actor_class: Any = ray.remote(_RayStepper)
        self._actor = actor_class.remote()
        ray.get(self._actor.step.remote(ACTION))
        return self

    def __exit__(self, *_: object) -> None:
        self._ray.shutdown()

    def latency_us(self, calls: int = 60) -> float:
        """Median of one call at a time."""
        return asyncio.run(self._one_at_a_time(calls))

    def rate(self, calls: int = 64 * 8) -> float:
        """Calls per second with 64 in flight."""
        return asyncio.run(self._in_flight(calls))

    async def _one_at_a_time(self, calls: int) -> float:
        times = []
        for _ in range(calls):
            began = time.perf_counter()
            await self._actor.step.remote(ACTION)
            times.append(time.perf_counter() - began)
        return statistics.median(times) * 1e6

    async def _in_flight(self, calls: int) -> float:
        async def caller() -> None:
            for _ in range(calls // IN_FLIGHT):
                await self._actor.step.remote(ACTION)

        began = time.perf_counter()
        await asyncio.gather(*(caller() for _ in range(IN_FLIGHT)))
        return calls / (time.perf_counter() - began)


class _RayStepper:
    def step(self, action: list[float]) -> list[float]:
        return ANSWER


def main() -> None:
    """Measure all in turn, print a table and the JSON line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument(
        "--without-ray", action="store_true", help="do not measure Ray, which is slow"
    )
    options = parser.parse_args()
    with ExitStack() as stack:
        ray = None if options.without_ray else stack.enter_context(Ray())
        ours, raw, bare = (
            stack.enter_context(Ours()),
            stack.enter_context(RawZeroMQ()),
            stack.enter_context(BareUvloop()),
        )
        _report(_measure(ours, raw, bare, ray, options.rounds), ours, raw)


def _measure(ours: Ours, raw: RawZeroMQ, bare: BareUvloop, ray: Ray | None, rounds: int) -> Samples:
    ways: dict[str, Callable[[], float]] = {
        "zmq latency us": raw.latency_us,
        "uvloop floor latency us": bare.latency_us,
        "our latency us": ours.latency_us,
        "zmq rate64": raw.rate,
        "our rate64": ours.rate,
    }
    if ray is not None:
        ways |= {"ray latency us": ray.latency_us, "ray rate64": ray.rate}
    return sample_in_turn(ways, rounds)


def _report(samples: Samples, ours: Ours, raw: RawZeroMQ) -> None:
    our_cpu, zmq_cpu = statistics.median(ours.cpu_us), statistics.median(raw.cpu_us)
    figures = {
        "latency_vs_zmq": ratio_of(samples, "our latency us", "zmq latency us"),
        "rate64_vs_zmq": ratio_of(samples, "our rate64", "zmq rate64"),
        "cpu64_vs_zmq": our_cpu / zmq_cpu,
        "uvloop_floor_vs_zmq": ratio_of(samples, "uvloop floor latency us", "zmq latency us"),
        "latency_vs_uvloop_floor": ratio_of(samples, "our latency us", "uvloop floor latency us"),
    }
    if "ray latency us" in samples:
        figures["latency_vs_ray"] = ratio_of(samples, "our latency us", "ray latency us")
        figures["rate64_vs_ray"] = ratio_of(samples, "our rate64", "ray rate64")
    rows = {**medians_of(samples), "our cpu us": our_cpu, "zmq cpu us": zmq_cpu, **figures}
    print_table("calls to an actor", rows)
    print_json_line(figures)


if __name__ == "__main__":
    main()
