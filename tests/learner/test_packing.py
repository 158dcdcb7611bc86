"""Packing: what goes in comes out, types and dtypes included, and nothing else goes in."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from vla_rl.learner.checkpoint.state import pack, unpack
from vla_rl.models.openvla_oft import OpenVlaOft
from vla_rl.types import Group, StopReason, Trajectory


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.uint8).reshape(2, 3),
        np.array(1.5, np.float32),
        np.zeros((0, 4), np.int64),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.array(["left", "right"]),
        np.array([True, False]),
        np.arange(4, dtype=">i2"),
    ],
)
def test_arrays_keep_dtype_shape_and_values(array: np.ndarray) -> None:
    found = unpack(pack({"nested": [array]}), dict[str, Any])["nested"][0]
    assert (found.dtype, found.shape) == (array.dtype, array.shape)
    np.testing.assert_array_equal(found, array)
    assert found.flags.writeable


def test_a_buffered_group_comes_back_whole(
    policy: OpenVlaOft, play: Callable[..., Trajectory]
) -> None:
    group = Group(
        group_id=3, trajectories=(play(policy, 1, 2), play(policy, 2, 1)), dispatch_version=4
    )
    (found,) = unpack(pack([group]), list[Group])
    assert found.trajectories[0].stop_reason is StopReason.TIME_LIMIT
    assert found.trajectories[0].episode == group.trajectories[0].episode
    for mine, its in zip(group.trajectories[0].steps, found.trajectories[0].steps, strict=True):
        np.testing.assert_array_equal(mine.observation["image"], its.observation["image"])
        np.testing.assert_array_equal(mine.chunk.log_probs, its.chunk.log_probs)
        assert mine.observation["instruction"] == its.observation["instruction"]


def test_numpy_numbers_become_plain_ones() -> None:
    assert unpack(pack([np.float64(0.5), np.int32(3), np.bool_(True)]), list[Any]) == [0.5, 3, True]


@pytest.mark.parametrize(
    "value",
    [object(), np.array([object()]), {"path": Path("x")}, np.zeros(2, [("a", "f4")])],
    ids=["object", "array of objects", "path", "array with fields"],
)
def test_what_is_not_plain_is_refused(value: object) -> None:
    with pytest.raises(TypeError, match="cannot be packed"):
        pack(value)


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [("M8[s/0]", (1,)), ("|O", (1,)), ("<f8", (2,)), ("<f8", (-1,)), ("<f8", (1 << 63,))],
)
def test_an_array_that_its_bytes_are_not_is_refused(dtype: str, shape: tuple[int, ...]) -> None:
    header = msgspec.msgpack.encode((dtype, shape))
    content = len(header).to_bytes(2, "little") + header + bytes(8)
    with pytest.raises(ValueError, match=r"dtype is|bytes are an array of shape"):
        unpack(msgspec.msgpack.encode(msgspec.msgpack.Ext(1, content)), np.ndarray)


def test_a_nesting_without_end_is_refused() -> None:
    with pytest.raises(ValueError, match="recursion"):
        unpack(b"\x91" * 100_000 + b"\xc0", list[Any])


def test_bytes_of_something_else_are_refused() -> None:
    for data in (
        b"",
        b"\xc1",
        pack({"a": 1}),
        msgspec.msgpack.encode(msgspec.msgpack.Ext(9, b"?")),
    ):
        with pytest.raises(ValueError, match="packed bytes are not"):
            unpack(data, list[int])
    with pytest.raises(ValueError, match="packed bytes are not"):
        unpack(pack({"tokens": 3}), dict[str, np.ndarray])
