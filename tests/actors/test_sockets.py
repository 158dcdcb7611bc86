"""The three things without which an edge-triggered socket hangs, and what a turn sends together."""

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import zmq

from vla_rl.actors.wire import sockets
from vla_rl.actors.wire.codec import Codec
from vla_rl.actors.wire.envelope import (
    ENVELOPE,
    MAGIC,
    PART_BYTES,
    Frames,
    Kind,
    MalformedMessage,
    join_messages,
    split_messages,
)
from vla_rl.actors.wire.sockets import LoopSocket, lift_high_water_mark

Pair = tuple["zmq.Socket[bytes]", "zmq.Socket[bytes]"]


class WithoutLookingAgain(LoopSocket):
    """The same socket without its second and third rule, to show that the tests below can fail."""

    def read_later(self) -> None:
        """Do not come back."""


@pytest.fixture
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    left, right = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    for socket in (left, right):
        lift_high_water_mark(socket)
    left.bind(f"ipc://@vla_rl-test-{id(context)}")
    right.connect(f"ipc://@vla_rl-test-{id(context)}")
    right.send(b"connected")
    left.recv()
    yield left, right
    context.destroy(linger=0)


def message(number: int) -> bytes:
    return ENVELOPE.pack(MAGIC, Kind.CALL, 0, 0, 0, number) + b"payload"


def number_of(frames: Frames) -> int:
    return int(ENVELOPE.unpack_from(frames[0])[5])


class Inbox:
    """Collects messages and says when there are enough."""

    def __init__(self, wanted: int) -> None:
        self.numbers: list[int] = []
        self._wanted, self._enough = wanted, asyncio.Event()

    def __call__(self, frames: Frames) -> None:
        self.numbers.append(number_of(frames))
        if len(self.numbers) == self._wanted:
            self._enough.set()

    async def until_enough(self) -> None:
        async with asyncio.timeout(10):
            await self._enough.wait()


def swallow_announcement(socket: "zmq.Socket[bytes]") -> None:
    """Wait until something has arrived, which reads the event away that would wake the loop."""
    while not socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:
        pass


async def test_one_wake_up_takes_everything_that_has_arrived(pair: Pair) -> None:
    left, right = pair
    inbox = Inbox(1000)
    socket = LoopSocket(left, inbox)
    for number in range(1000):
        right.send(message(number))
    await inbox.until_enough()
    assert inbox.numbers == list(range(1000))
    socket.close()


@pytest.mark.parametrize("kind", [LoopSocket, WithoutLookingAgain])
async def test_what_arrived_before_the_socket_was_registered_is_found(
    pair: Pair, kind: type[LoopSocket]
) -> None:
    left, right = pair
    right.send(message(1))
    swallow_announcement(left)
    inbox = Inbox(1)
    socket = kind(left, inbox)
    await turns(10)
    assert inbox.numbers == ([1] if kind is LoopSocket else [])
    socket.close()


@pytest.mark.parametrize("kind", [LoopSocket, WithoutLookingAgain])
async def test_what_arrived_while_sending_is_found(pair: Pair, kind: type[LoopSocket]) -> None:
    left, right = pair
    inbox = Inbox(1)
    socket = kind(left, inbox)
    await turns(3)
    right.send(message(2))
    swallow_announcement(left)
    socket.send([message(3)])
    await turns(10)
    assert inbox.numbers == ([2] if kind is LoopSocket else [])
    socket.close()


async def turns(number: int) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


async def test_many_messages_both_ways_at_once_all_arrive(pair: Pair) -> None:
    left, right = pair
    inboxes = Inbox(20_000), Inbox(20_000)
    sockets = LoopSocket(left, inboxes[0]), LoopSocket(right, inboxes[1])

    async def send(socket: LoopSocket) -> None:
        for number in range(20_000):
            socket.send([message(number)])
            if number % 7 == 0:
                await asyncio.sleep(0)

    await asyncio.gather(*(send(socket) for socket in sockets))
    await asyncio.gather(*(inbox.until_enough() for inbox in inboxes))
    assert inboxes[0].numbers == inboxes[1].numbers == list(range(20_000))
    for socket in sockets:
        socket.close()


async def test_what_the_other_side_does_not_take_yet_is_kept(pair: Pair) -> None:
    left, right = pair
    sender = LoopSocket(left, lambda frames: None)
    for number in range(20_000):
        sender.send([message(number)])
        await asyncio.sleep(0)  # each in a turn of its own: no batch saves it
    inbox = Inbox(20_000)
    receiver = LoopSocket(right, inbox)
    await inbox.until_enough()
    assert inbox.numbers == list(range(20_000))
    sender.close()
    receiver.close()


async def test_messages_keep_their_order_whatever_their_size(pair: Pair) -> None:
    left, right = pair
    inbox = Inbox(60)
    sender, receiver = LoopSocket(left, lambda frames: None), LoopSocket(right, inbox)
    for number in range(60):
        sender.send([message(number) + bytes(5000 if number % 5 == 0 else 0)])
    await inbox.until_enough()
    assert inbox.numbers == list(range(60))
    sender.close()
    receiver.close()


async def test_sending_to_nobody_is_no_error() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    lonely = context.socket(zmq.PAIR)
    lonely.bind("inproc://lonely")
    socket = LoopSocket(lonely, lambda frames: None)
    socket.send([message(1)])
    socket.close()
    socket.send([message(2)])
    context.term()


def test_a_batch_splits_into_what_was_joined() -> None:
    messages = [message(number) for number in range(5)]
    assert [bytes(part) for part in split_messages(join_messages(messages))] == messages


@pytest.mark.parametrize("cut", [1, 3, 10])
def test_a_truncated_batch_is_refused(cut: int) -> None:
    batch = join_messages([message(1), message(2)])
    with pytest.raises(MalformedMessage, match="batch that ends within"):
        split_messages(batch[:-cut])


async def test_a_peer_counts_as_there_until_all_that_it_sent_was_read() -> None:
    with zmq.Context() as ours:
        for turn in range(20):
            inbox, theirs = Inbox(200), zmq.Context()
            left, right = ours.socket(zmq.PAIR), theirs.socket(zmq.PAIR)
            for socket in (left, right):
                lift_high_water_mark(socket)
            left.bind(f"ipc://@vla_rl-test-{id(ours)}-{turn}")
            right.connect(f"ipc://@vla_rl-test-{id(ours)}-{turn}")
            reading = LoopSocket(left, inbox)
            for number in range(200):
                right.send(message(number) + bytes(1000))
            right.close(linger=20_000)
            # all is in the kernel's hands, as after the end of a process
            await asyncio.to_thread(theirs.term)
            while reading.has_peer:  # noqa: ASYNC110  it tells nobody
                await asyncio.sleep(0.001)
            reading.drain_all()
            assert inbox.numbers == list(range(200))
            reading.close()


# ---- messages that are larger than they say


FULL_PART = bytes(PART_BYTES - 1)
"""A frame that no further part continues, as large as such a frame can be."""


def announcing(num_frames: int, payload: bytes = b"\xc0") -> bytes:
    return ENVELOPE.pack(MAGIC, Kind.RESULT, 0, num_frames, 0, 1) + payload


@pytest.fixture
def _checked_from_a_mebibyte(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "UNCHECKED_BYTES", 1 << 20)


@pytest.mark.usefixtures("_checked_from_a_mebibyte")
@pytest.mark.parametrize(
    "frames",
    [
        [announcing(40), *[FULL_PART] * 40],
        [announcing(40, b"\x91"), *[FULL_PART] * 40],  # a payload that cannot be read
        [announcing(40), *[bytes(PART_BYTES)] * 40],  # parts of a frame that does not end
        [*Codec().encode(Kind.RESULT, 0, 0, 1, np.zeros(1 << 20, np.uint8), ""), *[FULL_PART] * 40],
    ],
    ids=["more frames than described", "no payload", "parts without an end", "after a real array"],
)
async def test_a_message_with_more_than_it_describes_is_cut_off_and_its_call_fails(
    pair: Pair, frames: list[bytes]
) -> None:
    left, right = pair
    received: list[Frames] = []
    socket = LoopSocket(left, received.append)
    head = bytearray(frames[0])
    head[4:6] = (len(frames) - 1).to_bytes(2, "little")
    right.send_multipart([bytes(head), *frames[1:]])
    right.send(message(7))
    async with asyncio.timeout(30):
        while len(received) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0)
    socket.close()
    assert [len(each) for each in received] == [1, 1]
    assert number_of(received[0]) == 1
    assert number_of(received[1]) == 7
    codec = Codec()
    with pytest.raises(MalformedMessage):
        codec.decode(codec.get_decoder(Any), received[0])


@pytest.mark.usefixtures("_checked_from_a_mebibyte")
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize(
    "value",
    [
        [np.arange(700_000), {"b": np.arange(300_000, dtype=np.int16)}, np.zeros(5000), "text"],
        ["x" * (3 << 20), np.arange(700_000)],  # whose payload comes in parts as well
        np.arange(1 << 20, dtype=np.uint8),
    ],
    ids=["arrays", "text and array", "exactly four parts"],
)
async def test_a_message_of_any_size_that_it_describes_arrives(
    pair: Pair, value: Any, in_place: bool
) -> None:
    left, right = pair
    received: list[Frames] = []
    socket = LoopSocket(left, received.append, in_place=in_place)
    frames = Codec().encode(Kind.RESULT, 0, 0, 1, value, "test")
    right.send_multipart([bytes(frame) for frame in frames])
    async with asyncio.timeout(30):
        while not received:  # noqa: ASYNC110
            await asyncio.sleep(0)
    socket.close()
    codec = Codec()
    found = codec.decode(codec.get_decoder(Any), received[0])
    np.testing.assert_equal(found, value)
    array = found if isinstance(found, np.ndarray) else found[1 if isinstance(found[0], str) else 0]
    assert not array.flags.writeable


@pytest.mark.usefixtures("_checked_from_a_mebibyte")
async def test_a_host_drops_a_message_of_a_client_that_is_too_large(pair: Pair) -> None:
    left, right = pair
    received: list[Frames] = []
    socket = LoopSocket(left, received.append, raw=True)
    right.send_multipart([b"identity", *[FULL_PART] * 40])
    right.send_multipart([b"identity", b"small"])
    async with asyncio.timeout(30):
        while len(received) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0)
    socket.close()
    assert [list(each) for each in received] == [[b"identity"], [b"identity", b"small"]]
