"""What a client sends becomes what the policy reads, or an error that names what is wrong."""

import subprocess
import sys

import msgspec
import numpy as np
import pytest

from vla_rl.errors import ConfigError
from vla_rl.serving.observation_maps import (
    PUBLISHED_MAPS,
    BadObservation,
    Entry,
    ObservationReader,
    find_entries,
    list_plan_entries,
    read_map,
)
from vla_rl.serving.openpi_messages import (
    BadMessage,
    decode_message,
    encode_message,
    flatten_names,
)

ARM = {
    "image": Entry("image"),
    "wrist_image": Entry("image"),
    "state": Entry("vector", 8),
    "instruction": Entry("text"),
}

IMAGE = np.full((6, 5, 3), 7, np.uint8)

LIBERO = {
    "observation/image": IMAGE,
    "observation/wrist_image": IMAGE + 1,
    "observation/state": np.arange(8.0),
    "prompt": "open the drawer",
}


def reader(*maps: str, entries: dict[str, Entry] = ARM) -> ObservationReader:
    return ObservationReader(entries, read_map(maps or ("libero",)))


def test_the_libero_map_reads_what_openpis_example_sends() -> None:
    read = reader().read(LIBERO)
    assert list(read) == list(ARM)
    assert read["state"].dtype == np.float32
    np.testing.assert_array_equal(read["state"], np.arange(8))
    np.testing.assert_array_equal(read["wrist_image"], IMAGE + 1)
    assert read["instruction"] == "open the drawer"


def test_the_policys_own_names_need_no_map() -> None:
    given = {"image": IMAGE, "wrist_image": IMAGE, "state": np.zeros(8), "instruction": "go"}
    assert reader("aloha").read(given)["instruction"] == "go"


def test_the_droid_map_joins_joints_and_gripper_and_leaves_out_a_camera() -> None:
    read = reader("droid").read(
        {
            "observation/exterior_image_1_left": IMAGE,
            "observation/exterior_image_2_left": IMAGE,
            "observation/wrist_image_left": IMAGE,
            "observation/joint_position": np.arange(7.0),
            "observation/gripper_position": np.float64(0.5),
            "prompt": "go",
        }
    )
    np.testing.assert_array_equal(read["state"], [0, 1, 2, 3, 4, 5, 6, 0.5])
    assert "image_2" not in read


def test_parts_of_a_vector_are_joined_as_the_map_says_whatever_order_they_come_in() -> None:
    sent = {
        "observation/gripper_position": np.ones(1),
        "observation/joint_position": np.arange(7.0),
    }
    read = reader("droid", entries={"state": ARM["state"]}).read(sent)
    np.testing.assert_array_equal(read["state"], [0, 1, 2, 3, 4, 5, 6, 1])


def test_the_aloha_map_takes_images_with_channels_first() -> None:
    entries = {"image": Entry("image"), "state": Entry("vector", 14)}
    read = reader("aloha", entries=entries).read(
        {"images/cam_high": IMAGE.transpose(2, 0, 1), "state": np.zeros(14), "prompt": "unused"}
    )
    np.testing.assert_array_equal(read["image"], IMAGE)


def test_a_float_image_is_scaled_from_0_and_1() -> None:
    read = reader().read(LIBERO | {"observation/image": np.full((2, 2, 3), 0.5)})
    assert (read["image"] == 128).all()


def test_every_wrong_entry_is_named_in_one_error() -> None:
    with pytest.raises(BadObservation) as raised:
        reader().read(
            {
                "observation/image": np.zeros((4, 4), np.uint8),
                "observation/state": np.zeros(7),
                "observation/foo": 1,
                "prompt": b"bytes",
            }
        )
    text = str(raised.value)
    assert "'observation/image' is uint8 [4, 4]" in text
    assert "'observation/wrist_image' or 'wrist_image' is missing" in text
    assert "'observation/state' has 7 numbers, expected 8" in text
    assert "'observation/foo' is unknown" in text
    assert "'prompt' is bytes, expected text" in text


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("observation/state", np.full(8, np.nan), "NaN or infinity"),
        ("observation/state", [0.0] * 8, "is list"),
        ("observation/state", np.zeros((1, 8)), r"float64 \[1, 8\]"),
        ("observation/image", np.full((2, 2, 3), 2.0), r"outside \[0, 1\]"),
        ("observation/image", np.full((2, 2, 3), np.nan), r"outside \[0, 1\]"),
        ("observation/image", np.zeros((2, 2, 3), np.int64), r"int64 \[2, 2, 3\]"),
        ("observation/image", np.zeros((0, 2, 3), np.uint8), r"uint8 \[0, 2, 3\]"),
        ("observation/image", np.zeros((2, 2, 4), np.uint8), r"uint8 \[2, 2, 4\]"),
        ("image", IMAGE, "'observation/image' and 'image' are the same entry"),
    ],
)
def test_a_wrong_entry_is_refused_with_what_was_expected(
    name: str, value: object, problem: str
) -> None:
    with pytest.raises(BadObservation, match=problem):
        reader().read(LIBERO | {name: value})


def test_entries_are_found_in_an_example() -> None:
    example = {"image": IMAGE, "state": np.zeros(3, np.float32), "instruction": "go"}
    assert find_entries(example) == {
        "image": Entry("image"),
        "state": Entry("vector", 3),
        "instruction": Entry("text"),
    }


def test_pairs_go_beside_published_maps() -> None:
    pairs = dict(read_map(["libero", "observation/top=top_image"]))
    assert pairs == {**dict(PUBLISHED_MAPS["libero"]), "observation/top": "top_image"}


def test_a_map_may_name_a_camera_that_the_policy_does_not_look_at_and_says_so_if_one_is_missing() -> (
    None
):
    mapped = reader("libero", "top=imge", entries=ARM)
    assert ("top", "imge") in mapped.list_unused()
    assert list(mapped.read(LIBERO | {"top": IMAGE})) == list(ARM)
    sent = {"top" if name == "observation/image" else name: each for name, each in LIBERO.items()}
    with pytest.raises(BadObservation) as raised:
        mapped.read(sent)
    assert "'observation/image' or 'image' is missing" in str(raised.value)
    assert "'top' is 'imge' in the map, which the policy does not read" in str(raised.value)


def test_unknown_entries_are_one_problem_with_what_to_do() -> None:
    with pytest.raises(BadObservation, match=r"'a' and 'b' are unknown, expected .* --map gives"):
        reader().read(LIBERO | {"a": 1, "b": 2})


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (("kuka",), "expected one of libero, droid, aloha, or a pair"),
        (("a=",), "expected one of"),
        (("prompt=image", "libero"), "two names for 'prompt'"),
    ],
)
def test_a_map_that_is_none_is_refused(options: tuple[str, ...], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        read_map(options)


def test_a_robots_plan_is_optional_and_read_with_the_rest() -> None:
    planning = reader(entries=ARM | list_plan_entries(7))
    assert set(planning.read(LIBERO)) == set(ARM)
    plan = np.zeros((4, 7))
    read = planning.read({**LIBERO, "planned_actions": plan, "delay": np.int64(4)})
    assert read["planned_actions"].dtype == np.float32
    assert read["planned_actions"].shape == (4, 7)
    assert read["delay"] == 4
    assert planning.describe()["delay"].startswith("a whole number (optional)")


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        (
            "planned_actions",
            np.zeros((4, 6)),
            r"float64 \[4, 6\], expected finite float32 \[rows, 7\]",
        ),
        ("planned_actions", np.full((4, 7), np.nan), "expected finite"),
        ("delay", 1.5, "expected a whole number"),
        ("delay", float("nan"), "expected a whole number"),
        ("delay", "four", "expected a whole number"),
    ],
)
def test_a_wrong_plan_is_refused(name: str, value: object, problem: str) -> None:
    planning = reader(entries=ARM | list_plan_entries(7))
    with pytest.raises(BadObservation, match=problem):
        planning.read({**LIBERO, name: value})


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


def packed_number(data: object, dtype: str) -> bytes:
    number = {b"__npgeneric__": True, b"data": data, b"dtype": dtype}
    return msgspec.msgpack.encode({"a": number})


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
        (packed(dtype="x" * 100_000), r"dtype 'x{79}\.\.\."),
        (packed(data=b"", shape=[0] * 33), "at most 32 sizes"),
        (packed(data=b"", shape=[0, 1 << 62]), "entry 'a' cannot be read"),
        (packed_number(300, "|i1"), "entry 'a' is 300, expected a number of int8"),
        (packed_number(float("nan"), "<i4"), "entry 'a' is nan, expected a number of int32"),
    ],
)
def test_a_frame_that_is_no_message_is_refused_at_once(frame: bytes, problem: str) -> None:
    with pytest.raises(BadMessage, match=problem):
        decode_message(frame)


@pytest.mark.parametrize("frame", [packed(dtype="M8[s/0]"), packed_number(1, "m8[Y/0]")])
def test_a_type_that_numpy_divides_by_zero_for_does_not_end_the_server(frame: bytes) -> None:
    # in a process of its own: SIGFPE would end the tests too
    decode = "import sys; from vla_rl.serving.openpi_messages import decode_message as d; d(sys.stdin.buffer.read())"
    ended = subprocess.run([sys.executable, "-c", decode], input=frame, capture_output=True)
    assert ended.returncode == 1
    assert b"expected one of numbers" in ended.stderr
