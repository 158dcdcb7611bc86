"""Shared-memory slots: read in place, given back, never leaked."""

import asyncio
import os
from collections.abc import Iterator

import numpy as np
import pytest
from sample_actors import Counter

from vla_rl.actors import ChildProcess, Runtime, release
from vla_rl.actors.wire.codec import Codec
from vla_rl.actors.wire.envelope import Kind, MalformedMessage
from vla_rl.actors.wire.slots import SlotReader, SlotWriter, create_arena, new_block

FRAME = np.arange(150_000, dtype=np.uint8)  # one slot of 256 KiB, the next power of two


@pytest.fixture
def arena() -> Iterator[tuple[SlotWriter, SlotReader]]:
    fd = create_arena(1 << 20)  # room for four such slots
    yield SlotWriter(fd), SlotReader(fd)
    os.close(fd)


@pytest.fixture
def codecs(arena: tuple[SlotWriter, SlotReader]) -> tuple[Codec, Codec]:
    return Codec(slots_out=arena[0]), Codec(slots_in=arena[1])


def send(sender: Codec, value: object) -> list[bytes]:
    return sender.encode(Kind.CALL, 0, 0, 1, value, "test")


def test_a_slot_is_given_back_when_the_last_view_is_gone(codecs: tuple[Codec, Codec]) -> None:
    sender, receiver = codecs
    array = receiver.decode(receiver.get_decoder(np.ndarray), send(sender, FRAME))
    assert np.array_equal(array, FRAME)
    assert sender.num_slots_taken == 1
    row = array[10:20].reshape(2, 5)
    del array
    assert sender.num_slots_taken == 1  # the row still looks at it
    del row
    assert sender.num_slots_taken == 0


def test_a_slot_can_be_given_back_before_its_view_is_gone(codecs: tuple[Codec, Codec]) -> None:
    sender, receiver = codecs
    array = receiver.decode(receiver.get_decoder(np.ndarray), send(sender, FRAME))
    assert release(array[:5]) is True
    assert sender.num_slots_taken == 0
    assert release(np.zeros(3)) is False


def test_a_late_release_does_not_free_the_slot_of_the_next_array(
    codecs: tuple[Codec, Codec],
) -> None:
    sender, receiver = codecs
    decoder = receiver.get_decoder(np.ndarray)
    first = receiver.decode(decoder, send(sender, FRAME))
    release(first)
    second = receiver.decode(decoder, send(sender, FRAME[::-1]))
    del first
    assert sender.num_slots_taken == 1
    assert np.array_equal(second, FRAME[::-1])


def test_arrays_that_find_no_slot_travel_as_frames(codecs: tuple[Codec, Codec]) -> None:
    sender, receiver = codecs
    messages = [send(sender, FRAME) for _ in range(5)]
    assert [len(frames) for frames in messages] == [1, 1, 1, 1, 2]
    arrays = [receiver.decode(receiver.get_decoder(np.ndarray), frames) for frames in messages]
    assert all(np.array_equal(array, FRAME) for array in arrays)
    del arrays
    assert sender.num_slots_taken == 0
    assert len(send(sender, FRAME)) == 1


def test_a_message_that_cannot_be_encoded_takes_no_slot(codecs: tuple[Codec, Codec]) -> None:
    sender, _ = codecs
    with pytest.raises(TypeError, match="cannot be sent"):
        send(sender, [FRAME, FRAME, object()])
    assert sender.num_slots_taken == 0


def test_a_message_that_is_discarded_gives_its_slots_back(codecs: tuple[Codec, Codec]) -> None:
    sender, receiver = codecs
    receiver.discard(send(sender, [FRAME, {"deep": FRAME}]))
    assert sender.num_slots_taken == 0


def test_a_message_of_another_type_gives_its_slots_back(codecs: tuple[Codec, Codec]) -> None:
    sender, receiver = codecs
    frames = send(sender, (FRAME, "not a number", FRAME))
    with pytest.raises(Exception, match="Expected `int`, got `str`"):
        receiver.decode(receiver.get_decoder(tuple[np.ndarray, int, np.ndarray]), frames)
    assert sender.num_slots_taken == 0


def test_a_slot_outside_the_arena_is_refused(arena: tuple[SlotWriter, SlotReader]) -> None:
    with pytest.raises(MalformedMessage, match="outside the shared memory"):
        arena[1].find_array(0, (1 << 20) + 4000, "|u1", (200,), 200)
    with pytest.raises(MalformedMessage, match="outside the shared memory"):
        arena[1].find_array(9999, 4096, "|u1", (200,), 200)


def test_a_view_outlives_the_codec_that_made_it(codecs: tuple[Codec, Codec]) -> None:
    sender, receiver = codecs
    array = receiver.decode(receiver.get_decoder(np.ndarray), send(sender, FRAME))
    del receiver, codecs
    assert np.array_equal(array, FRAME)


async def test_a_thousand_frames_to_a_child_and_back_leave_every_slot_free() -> None:
    async with asyncio.timeout(60), Runtime() as runtime:
        counter = await runtime.spawn(Counter, placement=ChildProcess(shared_memory_mib=4))
        image = np.zeros((224, 224, 3), dtype=np.uint8)
        for _ in range(50):
            async with asyncio.TaskGroup() as group:
                for _ in range(20):
                    group.create_task(counter.echo_array(image))
        await counter.total()
        assert runtime.info(counter).num_slots_taken == 0
        held = [await counter.echo_array(image) for _ in range(30)]
        assert all(np.array_equal(array, image) for array in held)


async def test_cancelled_calls_do_not_leak_the_slots_of_their_arguments() -> None:
    async with asyncio.timeout(60), Runtime() as runtime:
        counter = await runtime.spawn(Counter, placement=ChildProcess())
        blocker = asyncio.create_task(counter.wait_for_gate("blocker"))
        calls = [asyncio.create_task(counter.echo_array(FRAME)) for _ in range(10)]
        await counter.cancelled()
        assert runtime.info(counter).num_slots_taken == 10
        for call in calls:
            call.cancel()
        await asyncio.wait(calls)
        await counter.open_gate()
        await blocker
        await counter.total()
        assert runtime.info(counter).num_slots_taken == 0


async def test_a_child_without_shared_memory_gets_its_arrays_as_frames() -> None:
    async with asyncio.timeout(60), Runtime() as runtime:
        counter = await runtime.spawn(Counter, placement=ChildProcess(shared_memory_mib=0))
        assert np.array_equal(await counter.echo_array(FRAME), FRAME)


async def test_a_held_array_survives_the_death_of_its_sender() -> None:
    async with asyncio.timeout(60), Runtime() as runtime:
        counter = await runtime.spawn(Counter, placement=ChildProcess())
        array = await counter.echo_array(FRAME)
        await runtime.kill(counter)
        assert np.array_equal(array, FRAME)


def test_a_block_arrives_without_a_copy_and_its_slot_is_used_again(
    arena: tuple[SlotWriter, SlotReader],
) -> None:
    writer, reader = arena
    sender, receiver = Codec(slots_out=writer), Codec(slots_in=reader)
    block = writer.take_block(len(FRAME))
    assert block is not None
    block.array[:] = FRAME
    array = receiver.decode(receiver.get_decoder(np.ndarray), send(sender, block))
    assert np.array_equal(array, FRAME)
    assert not array.flags.writeable
    block.array[0] = 77  # nobody does this after sending; it shows that both look at the same bytes
    assert array[0] == 77
    assert sender.num_slots_taken == 1
    assert writer.take_block(len(FRAME)) is not block
    del array
    assert sender.num_slots_taken == 1  # the second block, which was not sent
    assert writer.take_block(len(FRAME)) is block


def test_a_block_in_a_message_that_cannot_be_encoded_is_given_back(
    arena: tuple[SlotWriter, SlotReader],
) -> None:
    sender = Codec(slots_out=arena[0])
    with pytest.raises(TypeError, match="cannot be sent"):
        send(sender, [arena[0].take_block(100_000), object()])
    assert sender.num_slots_taken == 0


def test_without_shared_memory_a_block_is_an_array_like_any_other() -> None:
    block = new_block(5)
    block.array[:] = 3
    codec = Codec()
    assert codec.decode(codec.get_decoder(np.ndarray), send(codec, block)).tolist() == [3] * 5


def test_a_slot_that_is_known_is_still_leased_anew_for_each_message(
    arena: tuple[SlotWriter, SlotReader],
) -> None:
    sender, receiver = Codec(slots_out=arena[0]), Codec(slots_in=arena[1])
    for number in range(5):
        array = receiver.decode(
            receiver.get_decoder(np.ndarray), send(sender, np.full(20_000, number, np.uint8))
        )
        assert array.tolist() == [number] * 20_000
        assert sender.num_slots_taken == 1
        del array
        assert sender.num_slots_taken == 0
