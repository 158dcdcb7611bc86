"""Messages come out of a stream of bytes whole and in order, however it is cut; limits are above zero."""

import msgspec
import pytest

from vla_rl.sandbox.protocol import (
    Cancel,
    FunctionCall,
    Import,
    ProcessLimits,
    Request,
    Unframer,
    frame,
)

MESSAGES = [
    Import("math"),
    FunctionCall(1, "math:sqrt", {"x": 4.0}, ProcessLimits(timeout_s=1.0)),
    Cancel(1),
]


def decoded(parts: list[bytes]) -> list[Request]:
    unframer = Unframer()
    return [
        msgspec.msgpack.decode(body, type=Request) for part in parts for body in unframer.feed(part)
    ]


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_a_stream_in_parts_of_any_size_gives_the_messages(size: int) -> None:
    stream = b"".join(map(frame, MESSAGES))
    parts = [stream[at : at + size] for at in range(0, len(stream), size)]
    assert decoded(parts) == MESSAGES


def test_a_message_that_is_not_complete_waits() -> None:
    unframer, sent = Unframer(), frame(Cancel(7))
    assert unframer.feed(sent[:-1]) == []
    assert unframer.feed(b"") == []
    assert len(unframer.feed(sent[-1:] + sent)) == 2


def test_a_message_of_no_bytes_is_one_too() -> None:
    assert Unframer().feed(b"\0\0\0\0") == [b""]


def test_without_a_limit_of_its_own_cpu_time_ends_after_the_clock() -> None:
    assert ProcessLimits(timeout_s=0.5).most_cpu_s == 2
    assert ProcessLimits(timeout_s=10.0).most_cpu_s == 11
    assert ProcessLimits(timeout_s=10.0, cpu_s=3).most_cpu_s == 3
