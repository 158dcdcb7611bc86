"""What bytes from elsewhere may cost: batches, parts of large frames and arrays, whatever they
claim to be.
"""

import contextlib
import subprocess
import sys
import tracemalloc
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, strategies as st

from vla_rl.actors import register_extension
from vla_rl.actors.wire import envelope
from vla_rl.actors.wire.codec import Codec, count_described_bytes
from vla_rl.actors.wire.envelope import (
    BATCHED_BELOW,
    ENVELOPE,
    ENVELOPE_SIZE,
    MAGIC,
    MOST_IN_BATCH,
    PART_BYTES,
    Kind,
    MalformedMessage,
    join_frames,
    join_messages,
    num_announced_frames,
    num_parts,
    split_frames,
    split_messages,
)

HEAD = ENVELOPE.pack(MAGIC, Kind.CALL, 0, 0, 0, 1)
BATCH_HEAD = ENVELOPE.pack(MAGIC, Kind.BATCH, 0, 0, 0, 0)


def decode(codec: Codec, payload: bytes, *frames: bytes) -> Any:
    return codec.decode(codec.get_decoder(Any), [HEAD + payload, *frames])


def peak_bytes(act: Any) -> int:
    """The most memory that Python had at a time during `act`, beyond what it had before."""
    tracemalloc.start()
    try:
        act()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


# ---- batches


def test_a_batch_of_empty_messages_is_refused_before_it_is_split() -> None:
    batch = BATCH_HEAD + bytes(8 << 20)  # two million messages without a byte

    def split() -> None:
        with pytest.raises(MalformedMessage, match="batch of 8388626 bytes, expected at most"):
            split_messages(batch)

    assert peak_bytes(split) < 100_000


def test_a_batch_holds_no_more_messages_than_a_sender_gathers() -> None:
    assert len(split_messages(join_messages([HEAD] * MOST_IN_BATCH))) == MOST_IN_BATCH
    with pytest.raises(MalformedMessage, match="batch of more than 16 messages"):
        split_messages(join_messages([b""] * (MOST_IN_BATCH + 1)))


def test_the_largest_batch_that_a_sender_gathers_is_split() -> None:
    messages = [HEAD + bytes(BATCHED_BELOW - 1 - len(HEAD))] * MOST_IN_BATCH
    assert [bytes(part) for part in split_messages(join_messages(messages))] == messages


@given(st.binary(max_size=400))
def test_any_bytes_are_a_batch_or_refused(content: bytes) -> None:
    try:
        messages = split_messages(BATCH_HEAD + content)
    except MalformedMessage:
        return
    assert join_messages([bytes(part) for part in messages]) == BATCH_HEAD + content


# ---- parts


@pytest.mark.parametrize(
    "num_bytes", [0, 1, PART_BYTES - 1, PART_BYTES, PART_BYTES + 1, 3 * PART_BYTES]
)
def test_a_frame_comes_out_of_its_parts_as_it_went_in(num_bytes: int) -> None:
    frame = np.random.default_rng(0).bytes(num_bytes)
    cut = split_frames([b"head", frame, b"tail"])
    assert len(cut) == 2 + num_parts(num_bytes)
    assert max(map(len, cut)) <= PART_BYTES
    assert [bytes(each) for each in join_frames(cut)] == [b"head", frame, b"tail"]


def test_a_frame_without_its_last_part_is_refused() -> None:
    with pytest.raises(MalformedMessage, match="last part is missing, after 2 parts"):
        join_frames([b"head", bytes(PART_BYTES), bytes(PART_BYTES)])


def test_more_parts_than_any_frame_has_are_refused_before_they_are_joined(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(envelope, "MAX_MESSAGE_BYTES", 4 * PART_BYTES)
    part = bytes(PART_BYTES)
    with pytest.raises(MalformedMessage, match="a frame of more than"):
        join_frames([part] * 5 + [b""])


@pytest.mark.parametrize(
    "value",
    [
        {"pictures": [np.arange(PART_BYTES, dtype=np.uint8), np.arange(300_000)], "note": "small"},
        ["x" * (3 * PART_BYTES), np.arange(70_000)],
        bytes(PART_BYTES - ENVELOPE_SIZE - 5),  # whose frame is exactly one part
    ],
    ids=["arrays", "text", "one part"],
)
def test_a_large_value_travels_in_parts(value: Any) -> None:
    codec = Codec()
    frames = codec.encode(Kind.CALL, 0, 0, 1, value, "test")
    assert max(map(len, frames)) <= PART_BYTES
    assert num_announced_frames(frames[0]) == len(frames) - 1
    received = codec.decode(codec.get_decoder(Any), [bytes(frame) for frame in frames])
    np.testing.assert_equal(received, value)


# ---- arrays and values


def array_of(dtype: bytes, shape: tuple[int, ...], content: bytes = b"") -> bytes:
    """The payload of one inline array."""
    meta = (
        bytes([len(shape), len(dtype)])
        + dtype
        + b"".join(size.to_bytes(8, "little") for size in shape)
    )
    meta = (len(meta) + 2).to_bytes(2, "little") + meta
    return msgspec.msgpack.encode(msgspec.msgpack.Ext(1, meta + content))


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        (b"|S0", (1 << 60,)),
        (b"|V0", (1 << 40,)),
        (b"(4,4)<f4", (0,)),
        (b"<f4", (0, 1 << 62)),
        (b"|O", (1,)),
        (b"<f4" * 40, (1,)),
        (b"\xff\xfe", (1,)),
    ],
)
def test_an_array_that_is_larger_than_its_bytes_is_refused(
    dtype: bytes, shape: tuple[int, ...]
) -> None:
    with pytest.raises(MalformedMessage, match="array of"):
        decode(Codec(), array_of(dtype, shape))


def test_a_time_unit_that_divides_by_zero_inside_numpy_is_refused() -> None:
    # in a process of its own: an array of this type would end this one
    script = (
        "import sys; from typing import Any; from vla_rl.actors.wire.codec import Codec\n"
        "from vla_rl.actors.wire.envelope import MalformedMessage\n"
        "codec = Codec()\n"
        "try:\n    codec.decode(codec.get_decoder(Any), [sys.stdin.buffer.read()])\n"
        "except MalformedMessage as error:\n    print(error)\n"
    )
    for dtype in (b"M8[s/0]", b"m8[Y/0]", b"M8[7D/0]"):
        message = HEAD + array_of(dtype, (1,), bytes(8))
        ended = subprocess.run(
            [sys.executable, "-c", script],
            input=message,
            capture_output=True,
            timeout=60,
            check=True,
        )
        assert ended.stdout.startswith(b"array of an unknown type: dtype is '" + dtype)


@pytest.mark.parametrize(
    "array",
    [
        np.array(["2026-11-28", "NaT"], "M8[ns]"),
        np.array([25], "m8[25us]"),
        np.array(["words", ""], "<U5"),
        np.array([b"bytes"], "|S5"),
        np.array([1, -1], ">i4"),
        np.array([1 + 2j], np.complex64),
        np.array([True]),
        np.array([1.5], np.float16),
    ],
    ids=lambda array: array.dtype.str,
)
def test_an_array_of_any_plain_type_travels(array: np.ndarray) -> None:
    codec = Codec()
    frames = codec.encode(Kind.CALL, 0, 0, 1, array, "test")
    received = codec.decode(codec.get_decoder(Any), [bytes(frame) for frame in frames])
    assert received.dtype == array.dtype
    np.testing.assert_array_equal(received, array)


@pytest.mark.parametrize(
    "array",
    [
        np.array([None]),
        np.zeros(2, [("a", "f4")]),
        np.array(["x"], np.dtypes.StringDType()),
        np.zeros((1,) * 40),
    ],
    ids=["objects", "fields", "text of any length", "40 axes"],
)
def test_an_array_that_no_reader_takes_is_refused_by_its_sender(array: np.ndarray) -> None:
    with pytest.raises(TypeError, match="cannot be sent"):
        Codec().encode(Kind.CALL, 0, 0, 1, array, "test")


def test_an_empty_array_travels() -> None:
    assert decode(Codec(), array_of(b"<f4", (0, 5))).shape == (0, 5)
    with pytest.raises(TypeError, match="an empty array of shape"):
        Codec().encode(Kind.CALL, 0, 0, 1, np.zeros((0, 1 << 40), np.uint8), "test")


@pytest.mark.parametrize(
    "payload",
    [
        b"\xdd\x0f\xff\xff\xff",
        b"\xdf\x0f\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xc9\xff\xff\xff\xff\x01",
    ],
    ids=["list", "dict", "bytes", "extension"],
)
def test_a_length_that_the_message_does_not_have_is_refused_before_it_is_allocated(
    payload: bytes,
) -> None:
    def decode_it() -> None:
        with pytest.raises(MalformedMessage):
            decode(Codec(), payload)

    assert peak_bytes(decode_it) < 1_000_000


def test_a_deep_nesting_is_refused() -> None:
    with pytest.raises(MalformedMessage, match="recursion"):
        decode(Codec(), b"\x91" * 100_000 + b"\xc0")


values = st.recursive(
    st.none() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@given(
    values,
    st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), max_size=8),
    st.integers(0, 200),
)
def test_a_broken_payload_is_read_or_refused_and_costs_no_more_than_its_bytes(
    value: Any, flips: list[tuple[int, int]], cut: int
) -> None:
    payload = bytearray(b"\x92" + msgspec.msgpack.encode(value) + array_of(b"<f4", (1,), bytes(4)))
    for position, byte in flips:
        payload[position % len(payload)] = byte
    codec = Codec()

    def decode_it() -> None:
        with contextlib.suppress(MalformedMessage, msgspec.ValidationError):
            decode(codec, bytes(payload[: max(0, len(payload) - cut)]))

    assert peak_bytes(decode_it) < 1_000_000 + 100 * len(payload)


def test_a_small_frame_is_not_touched() -> None:
    frames = [b"head", b"payload"]
    assert join_frames(frames) is frames
    assert split_frames(frames)[0] is frames[0]


def test_parts_are_dropped_as_they_are_joined() -> None:
    cut = split_frames([b"head", b"x" * 2 * PART_BYTES, b"tail"])
    whole = join_frames(cut)
    assert [len(frame) for frame in cut] == [4, 0, 0, 0, 4]
    assert [bytes(frame[:4]) for frame in whole] == [b"head", b"xxxx", b"tail"]


class Grid:
    """A class that msgspec does not know."""

    def __init__(self, cells: np.ndarray) -> None:
        self.cells = cells


GRID = 127
register_extension(GRID, Grid, lambda grid: [grid.cells], lambda content: Grid(content[0]))


@pytest.mark.parametrize("num_cells", [3, PART_BYTES], ids=["inside the message", "in frames"])
def test_a_registered_class_travels_as_its_content(num_cells: int) -> None:
    codec, sent = Codec(), Grid(np.arange(num_cells))
    frames = [bytes(each) for each in codec.encode(Kind.CALL, 0, 0, 1, {"grid": sent}, "here")]
    announced = count_described_bytes(memoryview(frames[0])[ENVELOPE_SIZE:])
    assert announced == (0 if num_cells == 3 else sent.cells.nbytes)
    read = codec.decode(codec.get_decoder(dict[str, Grid]), frames)["grid"]
    assert type(read) is Grid
    np.testing.assert_array_equal(read.cells, sent.cells)


def test_an_extension_that_nobody_registered_is_refused() -> None:
    payload = msgspec.msgpack.encode(msgspec.msgpack.Ext(99, msgspec.msgpack.encode([1])))
    with pytest.raises(MalformedMessage, match="extension 99 is unknown"):
        decode(Codec(), payload)


def test_a_number_names_one_extension() -> None:
    with pytest.raises(ValueError, match="extension 127 is taken"):
        register_extension(GRID, Grid, lambda grid: [grid.cells], lambda content: Grid(content[0]))
