"""Split large frames into parts of a fixed size, the most that a socket has to accept at once.

ZeroMQ allocates the announced size of a frame before it knows the peer, so its limit on the frame
size bounds the memory that an unknown connection may take. A part of exactly `PART_BYTES` is
continued by the next frame; a shorter one, which may be empty, is the last.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from vla_rl.actors.wire import MAX_MESSAGE_BYTES, Frames, MalformedMessage

PART_BYTES = 1 << 18
"""Large enough for a camera image, and for a frame's cost to be small compared with its
encryption."""

MAX_WIRE_FRAME_BYTES = PART_BYTES + 256
"""Largest frame that a socket accepts: a part, and the bytes that CURVE adds to it."""


def num_parts(num_bytes: int) -> int:
    """Return the number of frames for this many bytes."""
    return num_bytes // PART_BYTES + 1


def in_parts(frames: Sequence[Any]) -> list[Any]:
    """Cut frames of at least `PART_BYTES` into parts. The bytes are not copied."""
    return [part for frame in frames for part in _parts_of(frame)]


def joined(frames: Frames) -> Frames:
    """Join the frames that `in_parts` cut.

    Parts in a list are dropped as they are joined: a message never takes twice its size.

    Raises: MalformedMessage if a last part is missing, or a frame is too large.
    """
    if not any(len(frame) == PART_BYTES for frame in frames):
        return frames
    whole: list[Any] = []
    joining: bytearray | None = None
    for place, frame in enumerate(frames):
        if joining is None and len(frame) != PART_BYTES:
            whole.append(frame)
            continue
        joining = bytearray() if joining is None else joining
        joining += frame
        if len(joining) > MAX_MESSAGE_BYTES:
            raise MalformedMessage(f"a frame of more than {MAX_MESSAGE_BYTES} bytes.")
        if isinstance(frames, list):
            frames[place] = b""
        if len(frame) != PART_BYTES:
            whole.append(memoryview(joining).toreadonly())
            joining = None
    if joining is not None:
        num_parts = len(joining) // PART_BYTES
        raise MalformedMessage(f"a frame whose last part is missing, after {num_parts} parts.")
    return whole


def _parts_of(frame: Any) -> Iterator[Any]:
    if len(frame) < PART_BYTES:
        yield frame
        return
    view = memoryview(frame)
    for begin in range(0, len(view) + 1, PART_BYTES):
        yield view[begin : begin + PART_BYTES]
