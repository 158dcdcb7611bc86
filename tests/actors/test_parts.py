"""Large frames are cut into parts and joined again; a missing part is noticed."""

import pytest

from vla_rl.actors.wire import envelope
from vla_rl.actors.wire.envelope import (
    PART_BYTES,
    MalformedMessage,
    join_frames,
    num_parts,
    split_frames,
)


def test_frames_of_any_size_are_the_same_after_they_were_cut() -> None:
    sizes = [0, 1, PART_BYTES - 1, PART_BYTES, PART_BYTES + 1, 3 * PART_BYTES, 7]
    frames = [bytes([number]) * size for number, size in enumerate(sizes)]
    cut = split_frames(frames)
    assert max(len(part) for part in cut) == PART_BYTES
    assert len(cut) == sum(num_parts(size) for size in sizes)
    assert [bytes(frame) for frame in join_frames(cut)] == frames


def test_a_small_frame_is_not_touched() -> None:
    frames = [b"head", b"payload"]
    assert join_frames(frames) is frames
    assert split_frames(frames)[0] is frames[0]


def test_a_frame_without_its_last_part_is_refused() -> None:
    cut = split_frames([b"x" * 2 * PART_BYTES])
    with pytest.raises(MalformedMessage, match="whose last part is missing, after 2 parts"):
        join_frames(cut[:2])


def test_a_frame_above_the_limit_is_refused_before_it_is_joined(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(envelope, "MAX_MESSAGE_BYTES", PART_BYTES)
    with pytest.raises(MalformedMessage, match=f"a frame of more than {PART_BYTES} bytes"):
        join_frames(split_frames([b"x" * 2 * PART_BYTES]))


def test_parts_are_dropped_as_they_are_joined() -> None:
    cut = split_frames([b"head", b"x" * 2 * PART_BYTES, b"tail"])
    whole = join_frames(cut)
    assert [len(frame) for frame in cut] == [4, 0, 0, 0, 4]
    assert [bytes(frame[:4]) for frame in whole] == [b"head", b"xxxx", b"tail"]
