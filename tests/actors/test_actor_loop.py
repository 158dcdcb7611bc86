"""A child waits in ZeroMQ, and still is an asyncio loop like any other."""

import asyncio
import socket as sockets
import threading

import pytest
import zmq
from sample_actors import LoopUser

from vla_rl.actors import ChildProcess, Runtime, call_all
from vla_rl.actors.calls.running_calls import ActorLoop
from vla_rl.actors.wire.envelope import ENVELOPE, MAGIC, Frames, Kind, join_messages


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
        self.here, self.there = (self.context.socket(zmq.PAIR) for _ in range(2))
        self.here.bind(address)
        self.there.connect(address)
        self.there.setsockopt(zmq.RCVTIMEO, 20_000)

    def close(self) -> None:
        self.there.close(linger=0)
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

        def talk() -> None:
            answers.extend(ask(peer))  # type: ignore[operator]
            loop.call_soon_threadsafe(done.set)

        own = body(loop, peer)  # type: ignore[operator]
        thread = threading.Thread(target=talk)
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
    own = loop.open_socket(peer.here, lambda frames: own.send([bytes(frames[0])]))
    return own


def test_a_thread_wakes_the_loop_out_of_its_wait() -> None:
    def ask(peer: Peer) -> list[bytes]:
        return []  # nothing is ever said: only `call_soon_threadsafe` ends the wait

    assert run_with_peer(echo, ask) == []


def test_an_answer_leaves_at_once_and_those_to_a_batch_together() -> None:
    def ask(peer: Peer) -> list[bytes]:
        peer.there.send(message(1))
        first = peer.there.recv()
        peer.there.send(join_messages([message(2), message(3), message(4)]))
        return [first, peer.there.recv()]

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
            peer.there.send(message(number))
            peer.there.recv()
        return []

    run_with_peer(body, ask)
    assert ticks == ["tick"]


def test_what_a_message_schedules_is_run_before_the_next_wait() -> None:
    def body(loop: ActorLoop, peer: Peer) -> object:
        def later(frames: Frames) -> None:
            loop.call_soon(own.send, [bytes(frames[0])])

        own = loop.open_socket(peer.here, later)
        return own

    def ask(peer: Peer) -> list[bytes]:
        answers = []
        for number in range(3):
            peer.there.send(message(number))
            answers.append(peer.there.recv())
        return answers

    assert run_with_peer(body, ask) == [message(number) for number in range(3)]


def test_descriptors_are_read_beside_the_messages() -> None:
    left, right = sockets.socketpair()
    heard = []

    def body(loop: ActorLoop, peer: Peer) -> object:
        loop.add_reader(left, lambda: heard.append(left.recv(10)))
        return echo(loop, peer)

    def ask(peer: Peer) -> list[bytes]:
        right.send(b"news")
        while not heard:
            peer.there.send(message(1))
            peer.there.recv()
        return []

    run_with_peer(body, ask)
    assert heard == [b"news"]
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
