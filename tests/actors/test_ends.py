"""Ends that come at an inconvenient moment: each is noticed, none is undone, and nothing is left
behind.
"""

import asyncio
import contextlib
import gc
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from durations import at_some_pace
from processes import children_of
from sample_actors import Counter, FailsToStart, Slow, Streamer

from vla_rl.actors import Actor, ChildProcess, InLoop, Placement, RestartPolicy, Runtime, begin_call
from vla_rl.actors.calls import client
from vla_rl.actors.calls.handles import get_client
from vla_rl.actors.processes import channels as child_process_module
from vla_rl.actors.processes.channels import Channel, OnEnd
from vla_rl.actors.processes.started_process import StderrTail
from vla_rl.actors.supervision import Launchers
from vla_rl.actors.wire.envelope import OnMessage
from vla_rl.actors.wire.sockets import LoopSocket
from vla_rl.errors import ActorDied, ActorFrozen

BOTH = pytest.mark.parametrize(
    "placement",
    [pytest.param(InLoop(), marks=pytest.mark.proof), ChildProcess()],
    ids=["in_loop", "child_process"],
)
"""In the suite, where a call and its answer pass between processes."""


class Draft(msgspec.Struct):
    x: int


class Stubborn(Actor):
    """Holds on to what it waits for."""

    def __init__(self, started: asyncio.Event) -> None:
        self._started = started

    async def wait(self) -> None:
        self._started.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return


async def test_a_kill_is_not_lost_where_a_caller_gives_up_in_the_same_turn() -> None:
    async with asyncio.timeout(10), Runtime() as runtime:
        counter = await runtime.spawn(Counter)
        given_up = asyncio.create_task(counter.wait_for_gate("somebody"))
        behind = asyncio.create_task(counter.wait_for_gate("somebody else"))
        await counter.cancelled()
        given_up.cancel()
        killing = asyncio.create_task(runtime.kill(counter))
        with pytest.raises(ActorDied, match=r"(killed|stopped) by its owner"):
            await behind
        await killing
        assert given_up.cancelled()


async def test_an_endpoint_that_swallows_its_cancellation_does_not_keep_its_actor_alive() -> None:
    async with asyncio.timeout(10), Runtime() as runtime:
        started = asyncio.Event()
        stubborn = await runtime.spawn(Stubborn, started)
        first, second = asyncio.create_task(stubborn.wait()), asyncio.create_task(stubborn.wait())
        await started.wait()
        await runtime.kill(stubborn)
        outcomes = await asyncio.gather(first, second, return_exceptions=True)
        assert type(outcomes[1]) is ActorDied


@BOTH
async def test_a_frozen_call_is_found_while_others_beside_it_are_answered(
    placement: Placement,
) -> None:
    async with asyncio.timeout(20), Runtime() as runtime:
        counter = await runtime.spawn(Counter, placement=placement, deadline_s=0.5)
        frozen = asyncio.create_task(counter.wait_for_gate("nobody"))
        while not frozen.done():
            with contextlib.suppress(ActorFrozen):
                await counter.cancelled()
            await asyncio.sleep(0.02)
        with pytest.raises(ActorFrozen, match=r"wait_for_gate did not answer within 0\.5 s"):
            await frozen


@BOTH
async def test_leaving_a_runtime_ends_the_spawns_that_are_under_way(placement: Placement) -> None:
    before = children_of(os.getpid())
    spawning: list[asyncio.Task[Any]] = []

    async def leave() -> None:
        async with Runtime(stop_grace_s=60.0) as runtime:
            spawning.append(asyncio.create_task(runtime.spawn(Slow, placement=placement)))
            await runtime.spawn(FailsToStart, placement=placement)

    async with asyncio.timeout(20):
        with pytest.raises(RuntimeError, match="not plugged in"):
            await leave()
        assert children_of(os.getpid()) <= before
        with pytest.raises(ActorDied, match="stopped by its owner before it was ready"):
            await spawning[0]


async def test_a_runtime_that_is_being_left_spawns_nothing() -> None:
    before = children_of(os.getpid())

    class SpawnsAtItsEnd(Actor):
        async def on_stop(self) -> None:
            try:
                await runtime.spawn(Counter, placement=ChildProcess())
            except RuntimeError as error:
                said.append(str(error))

    said: list[str] = []
    async with asyncio.timeout(20):
        async with Runtime(name="short") as runtime:
            await runtime.spawn(SpawnsAtItsEnd)
    assert said == ["runtime 'short' is not open; use `async with`."]
    assert children_of(os.getpid()) <= before


async def test_an_actor_that_is_stopped_while_its_restart_fails_does_not_come_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = children_of(os.getpid())
    opened, launched = Launchers.make_launcher, list[str]()
    stopping: list[asyncio.Task[None]] = []

    def launcher(
        launchers: Launchers, name: str, *args: Any
    ) -> Callable[[OnMessage, OnEnd], Channel]:
        """Stop the actor in the turn in which a restart fails."""
        launch = opened(launchers, name, *args)

        def launch_or_fail(on_message: OnMessage, on_end: OnEnd) -> Channel:
            launched.append(name)
            if len(launched) == 2:
                stopping.append(asyncio.create_task(runtime.stop(counter)))
                raise OSError("no room")
            return launch(on_message, on_end)

        return launch_or_fail

    monkeypatch.setattr(Launchers, "make_launcher", launcher)
    async with asyncio.timeout(20), Runtime() as runtime:
        policy = RestartPolicy(max_restarts=5, within_s=60.0)
        counter = await runtime.spawn(Counter, placement=ChildProcess(), restart=policy)
        os.kill(runtime.info(counter).pid, signal.SIGKILL)
        while not stopping:  # noqa: ASYNC110  only the launcher knows
            await asyncio.sleep(0.01)
        await stopping[0]
        for _ in range(10):
            await asyncio.sleep(0)
        assert (runtime.info(counter).state, len(launched)) == ("stopped", 2)
        assert children_of(os.getpid()) <= before


async def test_words_are_kept_where_our_own_stderr_leads_nowhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class BrokenPipe:
        def write(self, text: str) -> int:
            raise BrokenPipeError(text)

    reading, writing = os.pipe()
    tail = StderrTail(reading, "talker")
    os.write(writing, b"no device\nno")
    monkeypatch.setattr(sys, "stderr", BrokenPipe())
    tail.close()
    monkeypatch.undo()
    os.close(writing)
    assert tail.lines == ("no device", "no")


async def test_a_death_is_told_whatever_fails_on_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: StderrTail) -> None:
        raise RuntimeError("the words cannot be read")

    async with asyncio.timeout(20), Runtime() as runtime:
        counter = await runtime.spawn(Counter, placement=ChildProcess())
        with monkeypatch.context() as patch:
            patch.setattr(StderrTail, "close", fail)
            with pytest.raises(ActorDied, match="exit code 3"):
                await counter.say_and_exit("no device", 3)


async def test_a_child_that_cannot_be_started_leaves_no_open_file() -> None:
    async with asyncio.timeout(20), Runtime() as runtime:
        placement = ChildProcess(env={"A=B": "x"})

        async def fail_to_start(times: int) -> None:
            for _ in range(times):
                with pytest.raises(ValueError, match="illegal environment variable name"):
                    await runtime.spawn(Counter, placement=placement)
            gc.collect()  # the shared memory goes with the error that refers to it

        await fail_to_start(2)
        await asyncio.sleep(0.1)
        # some of the first two may still be among them, fewer than twenty others would add
        expected = num_open_files()
        await fail_to_start(20)
        ends = time.monotonic() + 10.0
        while num_open_files() > expected and time.monotonic() < ends:  # noqa: ASYNC110
            await asyncio.sleep(0.02)  # ZeroMQ closes its own in a thread
        assert num_open_files() <= expected


def num_open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


async def test_an_entry_of_the_import_path_may_be_a_path(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, tmp_path])
    async with asyncio.timeout(20), Runtime() as runtime:
        counter = await runtime.spawn(Counter, placement=ChildProcess())
        assert await counter.add(1) == 1


@BOTH
async def test_a_call_inside_of_its_own_callers_stream_is_refused_and_the_actor_lives(
    placement: Placement,
) -> None:
    async with asyncio.timeout(20), Runtime() as runtime:
        streamer = await runtime.spawn(
            Streamer, placement=placement, deadlines_s={"serial_made": 0.5}
        )
        with pytest.raises(
            RuntimeError, match=r"serial_made was called during the iteration over a stream"
        ):
            _ = [await streamer.serial_made() async for _ in streamer.count(1000)]
        assert [number async for number in streamer.count(3)] == [0, 1, 2]
        assert await streamer.made() < 1000
        assert runtime.info(streamer).num_pending == 0


@BOTH
async def test_a_stream_that_does_not_stop_for_a_call_inside_of_it_is_found_frozen(
    placement: Placement,
) -> None:
    async with asyncio.timeout(20), Runtime() as runtime:
        deadlines_s = {"serial_made": 0.5, "count_and_linger": 3.0}
        streamer = await runtime.spawn(Streamer, placement=placement, deadlines_s=deadlines_s)
        with pytest.raises(
            RuntimeError, match=r"serial_made was called during the iteration over a stream"
        ):
            _ = [await streamer.serial_made() async for _ in streamer.count_and_linger(1000)]
        with pytest.raises(ActorFrozen, match="count_and_linger"):
            await streamer.serial_made()


@BOTH
async def test_a_begun_call_that_is_awaited_inside_of_its_callers_stream_is_refused(
    placement: Placement,
) -> None:
    async with asyncio.timeout(20), Runtime() as runtime:
        streamer = await runtime.spawn(
            Streamer, placement=placement, deadlines_s={"serial_made": 0.5}
        )
        with pytest.raises(
            RuntimeError, match=r"serial_made was called during the iteration over a stream"
        ):
            _ = [
                await begin_call(streamer, Streamer.serial_made) async for _ in streamer.count(1000)
            ]
        assert [number async for number in streamer.count(3)] == [0, 1, 2]
        assert await streamer.made() < 1000


@BOTH
async def test_a_call_begun_inside_of_a_slow_iteration_and_awaited_after_it_is_answered(
    placement: Placement,
) -> None:
    async def iterate(scale: float) -> None:
        streamer = await runtime.spawn(Streamer, placement=placement, deadline_s=0.5 * scale)
        items, started = [], []
        async for item in streamer.count(60):
            items.append(item)
            started.append(begin_call(streamer, Streamer.serial_made))
            if item == 20:
                await asyncio.sleep(1.5 * scale)
        assert items == list(range(60))
        assert [await call for call in started] == [60] * 60

    async with asyncio.timeout(100), Runtime() as runtime:
        await at_some_pace(iterate)


async def test_a_call_given_up_inside_of_a_slow_iteration_does_not_end_the_iteration() -> None:
    async with asyncio.timeout(20), Runtime() as runtime:
        streamer = await runtime.spawn(Streamer, deadline_s=0.5)
        items = []
        async for item in streamer.count(60):
            items.append(item)
            if item == 20:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0.05):
                        await streamer.serial_made()
                await asyncio.sleep(1.5)
        assert items == list(range(60))


class EndsSlowly(Actor):
    """Streams numbers and takes its time to stop."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    async def count(self, n: int) -> AsyncIterator[int]:
        try:
            for number in range(n):
                yield number
        finally:
            await asyncio.sleep(self._seconds)

    async def one(self) -> int:
        return 1


async def leave_and_call(actor: EndsSlowly, after_s: float) -> int:
    items = actor.count(1000)
    async for _ in items:
        await asyncio.sleep(after_s)  # all that were granted have arrived: the stream waits for us
        break
    leaving = asyncio.create_task(items.aclose())  # type: ignore[attr-defined]
    try:
        return await actor.one()
    finally:
        await leaving


async def test_the_deadline_of_a_stream_that_was_left_begins_as_it_is_left() -> None:
    async with asyncio.timeout(20), Runtime() as runtime:
        assert (
            await leave_and_call(await runtime.spawn(EndsSlowly, 0.4, deadline_s=1.0), after_s=1.5)
            == 1
        )


async def test_an_actor_that_does_not_stop_a_stream_that_was_left_is_frozen() -> None:
    async with asyncio.timeout(20), Runtime() as runtime:
        actor = await runtime.spawn(EndsSlowly, 3600.0, deadline_s=0.3)
        with pytest.raises(ActorFrozen, match=r"count did not answer within 0\.3 s"):
            await leave_and_call(actor, after_s=0.05)


async def test_a_call_behind_the_stream_of_a_slow_consumer_waits() -> None:
    async def consume(items: AsyncIterator[int]) -> None:
        await anext(items)
        started.set()
        await go_on.wait()
        async for _ in items:
            pass

    started, go_on = asyncio.Event(), asyncio.Event()
    async with asyncio.timeout(20), Runtime() as runtime:
        streamer = await runtime.spawn(Streamer, deadline_s=0.1)
        consuming = asyncio.create_task(consume(streamer.count(100)))
        await started.wait()
        asyncio.get_running_loop().call_later(0.4, go_on.set)
        assert await streamer.serial_made() == 100
        await consuming


@BOTH
async def test_a_value_that_fails_while_it_is_encoded_spoils_no_other_message(
    placement: Placement,
) -> None:
    unset = Draft(1)
    del unset.x
    frame = np.zeros(INLINE_NO_MORE, np.uint8)
    async with asyncio.timeout(20), Runtime() as runtime:
        counter = await runtime.spawn(Counter, placement=placement, mailbox=1)
        for values in (frame, np.zeros(100_000, np.uint8)):
            with pytest.raises(TypeError, match=r"echo: .*x"):
                await counter.echo([values, unset])
        assert await counter.echo(msgspec.UNSET is None) is False
        assert (await counter.echo_array(frame)).shape == frame.shape
        assert runtime.info(counter).num_slots_taken == 0


INLINE_NO_MORE = 8192
"""Bytes of an array that travels as a frame of its own."""


@BOTH
async def test_nothing_is_yielded_behind_an_item_that_is_missing(placement: Placement) -> None:
    async with asyncio.timeout(20), Runtime() as runtime:
        streamer = await runtime.spawn(Streamer, placement=placement)
        items: list[int] = []

        async def collect() -> None:
            async for item in streamer.mixed():
                await asyncio.sleep(0.05)  # all of them have arrived
                items.append(item)

        with pytest.raises(TypeError, match=r"Expected `int`, got `str`"):
            await collect()
        assert items == [1]


async def test_a_stopped_process_that_is_asked_for_its_lag_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client, "_WITHIN_S", 0.2)
    async with asyncio.timeout(20), Runtime() as runtime:
        counter = await runtime.spawn(Counter, placement=ChildProcess(), mailbox=1)
        pid = runtime.info(counter).pid
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(
            TimeoutError, match=r"did not report its lag within 0\.2 s: its loop is blocked"
        ):
            await runtime.loop_lag(counter)
        call = begin_call(counter, Counter.add, 1)
        assert runtime.info(counter).num_pending == 1  # the report holds no place
        # nor waits for one
        with pytest.raises(TimeoutError, match=r"did not report its lag within 0\.2 s"):
            await runtime.loop_lag(counter)
        os.kill(pid, signal.SIGCONT)
        assert await call == 1
        monkeypatch.undo()
        assert (await runtime.loop_lag(counter)).num_samples >= 0
        assert runtime.info(counter).num_rejected == 0


@BOTH
async def test_an_actor_with_a_full_mailbox_tells_its_lag(placement: Placement) -> None:
    async with asyncio.timeout(20), Runtime() as runtime:
        counter = await runtime.spawn(Counter, placement=placement, mailbox=1)
        call = asyncio.create_task(counter.wait_for_gate("caller"))
        while runtime.info(counter).num_pending == 0:  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert (await runtime.loop_lag(counter)).num_samples >= 0
        assert not call.done()
        call.cancel()


async def test_who_waits_for_the_lag_of_an_actor_that_dies_is_told() -> None:
    async with asyncio.timeout(20), Runtime() as runtime:
        counter = await runtime.spawn(Counter, placement=ChildProcess())
        pid = runtime.info(counter).pid
        os.kill(pid, signal.SIGSTOP)
        asking = asyncio.create_task(runtime.loop_lag(counter))
        await asyncio.sleep(0)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(ActorDied, match="SIGKILL"):
            await asking


async def test_the_end_of_a_process_is_told_once_all_that_it_sent_was_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    is_held_up = True
    monkeypatch.setattr(LoopSocket, "has_peer", property(lambda _: is_held_up))
    async with asyncio.timeout(60), Runtime() as runtime:
        counter = await runtime.spawn(Counter, placement=ChildProcess(), deadline_s=1.0)
        channel = get_client(counter)._calls.channel
        assert channel is not None
        call = asyncio.create_task(counter.total())
        await asyncio.sleep(0)
        os.kill(runtime.info(counter).pid, signal.SIGKILL)
        while not channel.is_ending:  # noqa: ASYNC110  a pidfd says it
            await asyncio.sleep(0.001)
        await asyncio.sleep(1.3)
        # neither dead nor, past its deadline, frozen
        assert runtime.info(counter).state == "running"
        is_held_up = False
        with contextlib.suppress(ActorDied):  # it may have answered before
            await call
        with pytest.raises(ActorDied, match="SIGKILL"):
            await counter.total()


class LeavesProcess(Actor):
    """Forks a process that outlives it, with all that it has open."""

    async def leave(self) -> int:
        pid = os.fork()
        if pid == 0:
            time.sleep(1000)  # noqa: ASYNC251  there is no loop any more
            os._exit(0)
        return pid


async def test_the_end_of_a_process_is_told_though_another_holds_its_socket_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(child_process_module, "_LAST_MESSAGES_WITHIN_S", 0.5)
    async with asyncio.timeout(60), Runtime() as runtime:
        actor = await runtime.spawn(LeavesProcess, placement=ChildProcess())
        left = await actor.leave()
        os.kill(runtime.info(actor).pid, signal.SIGKILL)
        with pytest.raises(ActorDied, match="SIGKILL"):
            await actor.leave()
        os.kill(left, signal.SIGKILL)
