"""Calls run inside the wait of an actor's loop, or go on in their task, within the credit of a stream."""

import asyncio
import socket as sockets
import threading

import pytest
import zmq
from sample_actors import Counter, LoopUser, SlowToStart, Streamer, Waiter

from vla_rl.actors import ChildProcess, Runtime, begin_call, call_all
from vla_rl.actors.calls.actor import get_method_table
from vla_rl.actors.calls.running_calls import ActorLoop, EagerCall, InboundCall
from vla_rl.actors.wire.envelope import ENVELOPE, MAGIC, Frames, Kind, join_messages
from vla_rl.actors.wire.sockets import MOST_BYTES


def message(number: int) -> bytes:
    return ENVELOPE.pack(MAGIC, Kind.CALL, 0, 0, 0, number)


def number_of(frames: Frames) -> int:
    return int(ENVELOPE.unpack_from(frames[0])[5])


class Peer:
    """The other end of the socket, in a thread, which blocks as a caller in another
    process would.
    """

    def __init__(self) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        address = f"ipc://@vla_rl-test-loop-{id(self)}"
        self.local, self.remote = (self.context.socket(zmq.PAIR) for _ in range(2))
        self.local.bind(address)
        self.remote.connect(address)
        self.remote.setsockopt(zmq.RCVTIMEO, 20_000)

    def close(self) -> None:
        self.remote.close(linger=0)
        self.context.term()


def run_with_peer(body: object, ask: object) -> list[bytes]:
    """Run `body(loop, peer, done)` on an `ActorLoop` while `ask(peer)` runs in a thread; what that
    returned.
    """
    peer, answers = Peer(), []

    async def live() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, ActorLoop)
        done = asyncio.Event()

        def send_all() -> None:
            answers.extend(ask(peer))  # type: ignore[operator]
            loop.call_soon_threadsafe(done.set)

        own = body(loop, peer)  # type: ignore[operator]
        thread = threading.Thread(target=send_all)
        thread.start()
        async with asyncio.timeout(20):
            await done.wait()
        thread.join()
        own.close()

    with asyncio.Runner(loop_factory=ActorLoop) as runner:
        runner.run(live())
    peer.close()
    return answers


def echo(loop: ActorLoop, peer: Peer) -> object:
    own = loop.open_socket(peer.local, lambda frames: own.send([bytes(frames[0])]))
    return own


def test_a_thread_wakes_the_loop_out_of_its_wait() -> None:
    def ask(peer: Peer) -> list[bytes]:
        return []  # nothing is ever said: only `call_soon_threadsafe` ends the wait

    assert run_with_peer(echo, ask) == []


def test_an_answer_leaves_at_once_and_those_to_a_batch_together() -> None:
    def ask(peer: Peer) -> list[bytes]:
        peer.remote.send(message(1))
        first = peer.remote.recv()
        peer.remote.send(join_messages([message(2), message(3), message(4)]))
        return [first, peer.remote.recv()]

    assert run_with_peer(echo, ask) == [
        message(1),
        join_messages([message(2), message(3), message(4)]),
    ]


def test_a_timer_is_run_while_messages_keep_coming() -> None:
    ticks = []

    def body(loop: ActorLoop, peer: Peer) -> object:
        loop.call_later(0.02, ticks.append, "tick")
        return echo(loop, peer)

    def ask(peer: Peer) -> list[bytes]:
        number = 0
        while not ticks:
            number += 1
            peer.remote.send(message(number))
            peer.remote.recv()
        return []

    run_with_peer(body, ask)
    assert ticks == ["tick"]


def test_what_a_message_schedules_is_run_before_the_next_wait() -> None:
    def body(loop: ActorLoop, peer: Peer) -> object:
        def later(frames: Frames) -> None:
            loop.call_soon(own.send, [bytes(frames[0])])

        own = loop.open_socket(peer.local, later)
        return own

    def ask(peer: Peer) -> list[bytes]:
        answers = []
        for number in range(3):
            peer.remote.send(message(number))
            answers.append(peer.remote.recv())
        return answers

    assert run_with_peer(body, ask) == [message(number) for number in range(3)]


def test_descriptors_are_read_beside_the_messages() -> None:
    left, right = sockets.socketpair()
    received = []

    def body(loop: ActorLoop, peer: Peer) -> object:
        loop.add_reader(left, lambda: received.append(left.recv(10)))
        return echo(loop, peer)

    def ask(peer: Peer) -> list[bytes]:
        right.send(b"news")
        while not received:
            peer.remote.send(message(1))
            peer.remote.recv()
        return []

    run_with_peer(body, ask)
    assert received == [b"news"]
    left.close()
    right.close()


async def test_an_actor_may_use_everything_that_its_loop_offers() -> None:
    async with asyncio.timeout(60), Runtime() as runtime:
        user = await runtime.spawn(LoopUser, placement=ChildProcess())
        assert await user.from_thread("a") == "a"
        assert await user.sleeps(0.01) == "slept"
        await user.begin_ticking(0.01)
        async with asyncio.timeout(20):
            while await user.ticks() < 3:  # its own task goes on between our calls
                pass
        assert await call_all([user] * 20, LoopUser.from_thread, "b") == ["b"] * 20


@pytest.mark.parametrize("seconds", [0.0, 0.002])
async def test_short_and_long_calls_keep_their_order(seconds: float) -> None:
    async with asyncio.timeout(60), Runtime() as runtime:
        user = await runtime.spawn(LoopUser, placement=ChildProcess())
        calls = [user.note(number, seconds if number % 3 == 0 else 0.0) for number in range(30)]
        await asyncio.gather(*calls)
        assert await user.notes() == list(range(30))


async def test_a_timeout_that_has_passed_before_the_first_wait_ends_that_wait() -> None:
    async with asyncio.timeout(60), Runtime() as runtime:
        waiter = await runtime.spawn(Waiter, placement=ChildProcess())
        assert [await waiter.give_up_at_once() for _ in range(3)] == ["timed out"] * 3


async def test_task_and_context_are_the_same_before_and_behind_a_wait() -> None:
    async with asyncio.timeout(60), Runtime() as runtime:
        waiter = await runtime.spawn(Waiter, placement=ChildProcess())
        assert await waiter.same_task_and_context()


async def test_a_cancellation_reaches_what_a_begun_call_waits_for() -> None:
    async with asyncio.timeout(60), Runtime() as runtime:
        waiter = await runtime.spawn(Waiter, placement=ChildProcess())
        assert not await waiter.noted_cancellation()  # from here on it is idle
        call = asyncio.create_task(waiter.wait_for_gate())
        await asyncio.sleep(0)  # it is sent, and the cancellation right behind it
        call.cancel()
        await asyncio.wait([call])
        assert call.cancelled()
        await waiter.give_up_at_once()
        assert await waiter.noted_cancellation()


async def test_calls_behind_one_another_are_answered_one_by_one() -> None:
    async with asyncio.timeout(60), Runtime() as runtime:
        waiter = await runtime.spawn(Waiter, placement=ChildProcess())
        times = await asyncio.gather(*(waiter.hold_up(0.002) for _ in range(20)))
        assert times == sorted(times)


async def test_calls_that_were_begun_leave_before_they_are_awaited() -> None:
    async with asyncio.timeout(60), Runtime() as runtime:
        counters = [
            await runtime.spawn(Counter, start, placement=ChildProcess(), mailbox=1)
            for start in (10, 20)
        ]
        answers = [begin_call(counter, Counter.add, 1) for counter in counters]
        assert [runtime.info(counter).num_pending for counter in counters] == [1, 1]
        # the mailbox is full: it leaves when it is awaited
        late = begin_call(counters[0], Counter.add, 1)
        assert [await answer for answer in answers] == [11, 21]
        assert await late == 12


async def test_an_actor_that_is_not_ready_in_time_is_named_with_its_last_words() -> None:
    async with asyncio.timeout(100), Runtime() as runtime:
        # on a busy machine the process itself may take longer than the limit
        for limit_s in (2.0, 8.0, 32.0):
            with pytest.raises(
                TimeoutError, match=rf"'slow' was not ready within {limit_s} s"
            ) as caught:
                await runtime.spawn(
                    SlowToStart, name="slow", placement=ChildProcess(), start_timeout_s=limit_s
                )
            if "still loading the weights" in str(caught.value):
                return
        pytest.fail(f"its last words are missing: {caught.value}")


async def test_a_cancellation_that_comes_before_the_call_is_awaited_cancels_what_it_waits_for() -> (
    None
):
    gate: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    seen = []

    async def running() -> None:
        try:
            await gate
        except asyncio.CancelledError:
            seen.append("cancelled")

    coroutine = running()
    call = EagerCall(coroutine, coroutine.send(None))
    call.cancellation = asyncio.CancelledError()
    await call
    assert gate.cancelled()
    assert seen == ["cancelled"]


async def test_an_error_of_the_first_part_is_raised_where_the_rest_is_awaited() -> None:
    async def running() -> None:
        raise SystemExit(3)

    coroutine = running()
    with pytest.raises(SystemExit) as first:
        coroutine.send(None)
    with pytest.raises(SystemExit, match="3"):
        await EagerCall(coroutine, error=first.value)


def a_stream() -> InboundCall:
    return InboundCall(get_method_table(Streamer).by_name["count"], 1, (), runner=None)  # type: ignore[arg-type]


def test_each_item_takes_one_credit() -> None:
    call = a_stream()
    assert not call.has_credit
    call.grant_items(2)
    call.count_item(0)
    assert call.has_credit
    call.count_item(0)
    assert not call.has_credit


def test_large_items_that_were_not_read_hold_the_next_one_back_whatever_the_credit() -> None:
    call = a_stream()
    call.grant_items(16)
    call.count_item(MOST_BYTES - 1)
    assert call.has_credit
    call.count_item(1)
    assert not call.has_credit
    call.grant_items(1)  # the first of them was read
    assert call.has_credit


async def test_a_stream_that_waits_goes_on_with_the_next_credit_that_suffices() -> None:
    call = a_stream()
    call.grant_items(2)
    call.count_item(MOST_BYTES)
    call.count_item(MOST_BYTES)
    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        waiting = group.create_task(call.until_credit())
        await asyncio.sleep(0)
        call.grant_items(1)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not waiting.done()
        call.grant_items(1)
