"""Actors that the tests spawn; importable by child processes and hosts."""

import asyncio
import contextvars
import os
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from vla_rl.actors import Actor, Runtime, actor_method, close_handle


class Point(msgspec.Struct, frozen=True):
    x: int
    y: int


class Labelled(msgspec.Struct, frozen=True):
    label: str
    values: np.ndarray


class Counter(Actor):
    """Counts, remembers the order of what it was told, and misbehaves on request."""

    def __init__(self, start: int = 0) -> None:
        if start < 0:
            raise ValueError(f"start is {start}, expected >= 0.")
        self._total = start
        self._seen: list[int] = []
        self._gate = asyncio.Event()
        self._running = 0
        self._most_running = 0
        self._cancelled: list[str] = []

    async def add(self, n: int) -> int:
        self._seen.append(n)
        self._total += n
        return self._total

    async def total(self) -> int:
        return self._total

    async def scaled(self, n: int, *, by: int = 2) -> int:
        return n * by

    async def seen(self) -> list[int]:
        return self._seen

    async def slow_add(self, n: int) -> int:
        self._running += 1
        self._most_running = max(self._most_running, self._running)
        for _ in range(3):
            await asyncio.sleep(0)
        self._running -= 1
        return await self.add(n)

    async def most_running(self) -> int:
        return self._most_running

    async def wait_for_gate(self, who: str) -> str:
        try:
            await self._gate.wait()
        except asyncio.CancelledError:
            self._cancelled.append(who)
            raise
        return who

    @actor_method(concurrent=True)
    async def wait_concurrently(self, who: str) -> str:
        return await self.wait_for_gate(who)

    @actor_method(concurrent=True)
    async def open_gate(self) -> None:
        self._gate.set()

    @actor_method(concurrent=True)
    async def cancelled(self) -> list[str]:
        return self._cancelled

    async def move(self, point: Point, dx: int) -> Point:
        return Point(point.x + dx, point.y)

    async def echo(self, value: Any) -> Any:
        return value

    async def echo_array(self, values: np.ndarray) -> np.ndarray:
        return values

    async def echo_labelled(self, items: list[Labelled]) -> list[Labelled]:
        return items

    async def write_into(self, values: np.ndarray) -> None:
        values[0] = 1

    async def describe(self, value: Any) -> str:
        return type(value).__name__

    async def promises_int(self) -> int:
        return "three"  # type: ignore[return-value]

    async def returns_unsendable(self) -> Any:
        return object()

    async def raise_value_error(self, text: str) -> None:
        raise ValueError(text)

    async def raise_own_error(self) -> None:
        raise OwnError("mine")

    async def raise_surrogate(self) -> None:
        raise ValueError("caf\udcff", {"caf\udcff"})

    async def raise_unspeakable(self) -> None:
        raise ValueError(Unspeakable())

    async def raise_cancelled(self) -> None:
        raise asyncio.CancelledError

    async def pid(self) -> int:
        return os.getpid()

    async def say_and_exit(self, words: str, code: int) -> None:
        sys.stderr.write(words + "\n")
        sys.stderr.flush()
        os._exit(code)

    async def block(self, seconds: float) -> None:
        time.sleep(seconds)  # noqa: ASYNC251  it is meant to block its loop

    async def work(self, seconds: float) -> None:
        # in pieces, so that a time in which it is stopped is none of it
        for _ in range(round(seconds / 0.02)):
            time.sleep(0.02)  # noqa: ASYNC251

    async def environment(self, name: str) -> str | None:
        return os.environ.get(name)


class Unspeakable:
    """Says nothing of itself."""

    def __repr__(self) -> str:
        raise RuntimeError("no words")


class OwnError(Exception):
    """A class that the caller does not know."""


class Streamer(Actor):
    """Streams numbers and remembers how far it came."""

    def __init__(self) -> None:
        self._made = 0
        self._closed = 0
        self._made_one = asyncio.Event()

    async def count(self, n: int) -> AsyncIterator[int]:
        try:
            for number in range(n):
                self._made += 1
                yield number
        finally:
            self._closed += 1

    @actor_method(concurrent=True)
    async def count_concurrently(self, n: int) -> AsyncIterator[int]:
        async for number in self.count(n):
            yield number

    async def count_and_linger(self, n: int) -> AsyncIterator[int]:
        """Takes for ever to stop."""
        try:
            for number in range(n):
                yield number
        finally:
            await asyncio.sleep(3600)

    async def serial_made(self) -> int:
        return self._made

    async def mixed(self) -> AsyncIterator[int]:
        for item in (1, "x", 3, 4):
            yield item  # type: ignore[misc]

    async def count_and_fail(self, n: int) -> AsyncIterator[int]:
        for number in range(n):
            yield number
        raise ValueError("no more numbers")

    async def frames(self, n: int, shape: tuple[int, ...]) -> AsyncIterator[np.ndarray]:
        for number in range(n):
            yield np.full(shape, number, dtype=np.uint8)

    @actor_method(concurrent=True)
    async def images(self, n: int, num_bytes: int) -> AsyncIterator[np.ndarray]:
        async for number in self.count(n):
            yield np.full(num_bytes, number, np.uint8)

    @actor_method(concurrent=True)
    async def made(self) -> int:
        return self._made

    @actor_method(concurrent=True)
    async def closed(self) -> int:
        return self._closed


class Slow(Actor):
    """Needs its time to start."""

    async def on_start(self) -> None:
        await asyncio.sleep(3600)


class FailsToStart(Actor):
    async def on_start(self) -> None:
        raise RuntimeError("the simulator is not plugged in")


class DiesAtStart(Actor):
    def __init__(self) -> None:
        sys.stderr.write("out of simulators\n")
        sys.stderr.flush()
        os._exit(7)


class CrashLoop(Actor):
    """Exits when it is asked to."""

    async def exit(self) -> None:
        os._exit(9)

    async def pid(self) -> int:
        return os.getpid()


class WritesOnStop(Actor):
    """Leaves a file when it is stopped in order."""

    def __init__(self, path: str) -> None:
        self._path = path

    async def on_stop(self) -> None:
        Path(self._path).write_text("stopped")  # noqa: ASYNC240  a few bytes, at the very end

    async def ping(self) -> None:
        """Answer."""


class FailsToStop(Actor):
    """Raises when it is stopped in order."""

    async def on_stop(self) -> None:
        raise ValueError("the gripper does not open")

    async def ping(self) -> int:
        """Its process."""
        return os.getpid()


_CALL_NAME: contextvars.ContextVar[str] = contextvars.ContextVar("call_name")


class Waiter(Actor):
    """Waits in its methods for what a call waits for: a turn, a time, another task, a gate."""

    def __init__(self) -> None:
        self._gate = asyncio.Event()
        self.was_cancelled = False

    async def give_up_at_once(self) -> str:
        """A timeout that has passed before the first wait."""
        try:
            async with asyncio.timeout(0):
                await self._gate.wait()
        except TimeoutError:
            return "timed out"
        return "open"

    async def same_task_and_context(self) -> bool:
        """Whether what holds before a wait holds behind it."""
        before = asyncio.current_task()
        _CALL_NAME.set("mine")
        await asyncio.sleep(0)
        return asyncio.current_task() is before and _CALL_NAME.get() == "mine"

    async def wait_for_gate(self) -> None:
        """Waits for ever, and notes its cancellation."""
        try:
            await self._gate.wait()
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise

    async def noted_cancellation(self) -> bool:
        """Whether it did."""
        return self.was_cancelled

    async def hold_up(self, seconds: float) -> float:
        """Work without a wait; when it was done."""
        time.sleep(seconds)  # noqa: ASYNC251  as a simulator does
        return time.monotonic()


class SlowToStart(Actor):
    """Says something and is never ready."""

    async def on_start(self) -> None:
        print("still loading the weights", file=sys.stderr, flush=True)
        await asyncio.Event().wait()


class LoopUser(Actor):
    """Uses its loop in every way that an actor may."""

    def __init__(self) -> None:
        self._ticks = 0
        self._ticking: asyncio.Task[None] | None = None
        self._notes: list[int] = []

    async def on_stop(self) -> None:
        if self._ticking is not None:
            self._ticking.cancel()

    async def from_thread(self, text: str) -> str:
        return await asyncio.to_thread(str, text)

    async def sleeps(self, seconds: float) -> str:
        await asyncio.sleep(seconds)
        return "slept"

    async def begin_ticking(self, interval_s: float) -> None:
        self._ticking = asyncio.create_task(self._tick(interval_s))

    async def ticks(self) -> int:
        return self._ticks

    async def note(self, number: int, after_s: float) -> None:
        if after_s > 0:
            await asyncio.sleep(after_s)
        self._notes.append(number)

    async def notes(self) -> list[int]:
        return self._notes

    async def _tick(self, interval_s: float) -> None:
        while True:
            await asyncio.sleep(interval_s)
            self._ticks += 1


class Holder(Actor):
    """Calls actors whose handles it was sent."""

    def __init__(self) -> None:
        self._kept: Counter | None = None

    async def class_name(self, counter: Counter) -> str:
        return type(counter).__name__

    async def add_through(self, counter: Counter, n: int) -> int:
        return await counter.add(n)

    async def keep(self, counter: Counter) -> None:
        self._kept = counter

    @actor_method(concurrent=True)
    async def add_kept(self, n: int) -> int:
        assert self._kept is not None
        return await self._kept.add(n)

    @actor_method(concurrent=True)
    async def slow_add_kept(self, n: int) -> int:
        assert self._kept is not None
        return await self._kept.slow_add(n)

    @actor_method(concurrent=True)
    async def wait_kept(self, who: str) -> str:
        assert self._kept is not None
        return await self._kept.wait_concurrently(who)

    async def send_on(self, other: "Holder") -> int:
        """Send a handle that is used here to another actor."""
        assert self._kept is not None
        return await other.add_through(self._kept, 1)

    async def close(self) -> None:
        close_handle(self._kept)

    async def drop(self) -> None:
        self._kept = None

    async def sum_of_arrays(self, streamer: Streamer, num: int, size: int) -> int:
        return sum([int(each.sum()) async for each in streamer.images(num, size)])

    async def pairs(self, both: dict[str, Counter]) -> dict[str, int]:
        return {name: await counter.add(1) for name, counter in both.items()}


class Nest(Actor):
    """Has an actor of its own beside it, whose handle it gives away."""

    async def on_start(self) -> None:
        self._runtime = Runtime("nest")
        await self._runtime.__aenter__()
        self._counter = await self._runtime.spawn(Counter, 100)

    async def shared(self) -> Counter:
        return await self._runtime.share(self._counter)

    async def on_stop(self) -> None:
        await self._runtime.__aexit__(None, None, None)
