"""Frames of openpi's own client are read, and what is no message is refused."""

import msgspec
import numpy as np
import pytest

from vla_rl.serving.openpi_messages import (
    BadMessage,
    decode_message,
    encode_message,
    flatten_names,
)

# written by openpi_client.msgpack_numpy of openpi-client 0.1.2
OBSERVATION = bytes.fromhex(
    "85b16f62736572766174696f6e2f696d61676584c40b5f5f6e6461727261795f5fc3c40464617461c40c0001020304"
    "05060708090a0bc4056474797065a37c7531c405736861706593020203b16f62736572766174696f6e2f7374617465"
    "84c40b5f5f6e6461727261795f5fc3c40464617461c410000000000000e03f000000000000f0bfc4056474797065a3"
    "3c6638c40573686170659102a670726f6d7074a77069636b207570a76772697070657283c40d5f5f6e7067656e6572"
    "69635f5fc3c40464617461cb3fd0000000000000c4056474797065a33c6634a6696d6167657381a863616d5f686967"
    "6884c40b5f5f6e6461727261795f5fc3c40464617461c406000000000000c4056474797065a37c7531c40573686170"
    "6593030102"
)


def test_an_observation_of_openpis_client_is_read() -> None:
    message = flatten_names(decode_message(OBSERVATION))
    assert list(message) == [
        "observation/image", "observation/state", "prompt", "gripper", "images/cam_high",
    ]  # fmt: skip
    expected = np.arange(12, dtype=np.uint8).reshape(2, 2, 3)
    np.testing.assert_array_equal(message["observation/image"], expected)
    np.testing.assert_array_equal(message["observation/state"], [0.5, -1.0])
    assert message["observation/state"].dtype == np.float64
    assert message["prompt"] == "pick up"
    assert message["gripper"] == np.float32(0.25)
    assert message["images/cam_high"].shape == (3, 1, 2)


def test_the_bytes_of_a_message_are_those_of_openpis_client() -> None:
    assert encode_message(decode_message(OBSERVATION)) == OBSERVATION


def test_arrays_that_are_not_contiguous_are_sent_whole() -> None:
    array = np.arange(6.0).reshape(2, 3).T
    sent = decode_message(encode_message({"a": array, "b": np.array(2.0), "c": array[:0]}))
    np.testing.assert_array_equal(sent["a"], array)
    assert sent["b"].shape == ()
    assert sent["c"].shape == (0, 2)


def packed(**array: object) -> bytes:
    whole = {b"__ndarray__": True, b"data": b"\0" * 8, b"dtype": "<f8", b"shape": [1]}
    return msgspec.msgpack.encode(
        {"a": whole | {key.encode(): each for key, each in array.items()}}
    )


@pytest.mark.parametrize(
    ("frame", "problem"),
    [
        (b"", "no msgpack"),
        (b"\xc1", "no msgpack"),
        (b"\xdd\xff\xff\xff\xff", "no msgpack"),  # a list of 2**32 - 1
        (b"\xc6\xff\xff\xff\xff", "no msgpack"),  # bytes, as many
        (b"\x91" * 100_000 + b"\xc0", "no msgpack"),  # lists in lists
        (b"\x81\xa1a" * 100_000, "no msgpack"),  # maps in maps
        (b"\x81\xa1a" * 100 + b"\xc0", "nested more than 8 deep"),
        (b"\x81\x01\x02", "the key 1"),
        (b"\x81\xa1\xff\x02", "no msgpack"),
        (b"\x93\x01\x02\x03", "type list"),
        (packed(dtype="|O"), r"dtype '\|O'"),
        (packed(dtype="S8"), "dtype 'S8'"),
        (packed(dtype="<f8,<f8"), "dtype '<f8,<f8'"),
        (packed(dtype="(2,)<f4"), r"dtype '\(2,\)<f4'"),
        (packed(dtype="f8; import os"), "dtype"),
        (packed(dtype=7), "dtype 7"),
        (packed(shape=[2]), "8 bytes, expected 16"),
        (packed(shape=[1 << 40, 1 << 40]), "8 bytes, expected"),
        (packed(shape=[-1]), r"shape \[-1\]"),
        (packed(shape=[True]), r"shape \[True\]"),
        (packed(shape="x"), "without data or shape"),
        (packed(data="text"), "without data or shape"),
    ],
)
def test_a_frame_that_is_no_message_is_refused_at_once(frame: bytes, problem: str) -> None:
    with pytest.raises(BadMessage, match=problem):
        decode_message(frame)
