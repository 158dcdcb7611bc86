"""Conversations are observations, whose messages, replies, arrays keep their values on the way."""

from pathlib import Path

import msgspec
import numpy as np
import pytest

from vla_rl.types import Completion, Message, TextOutcome, TextStart, ToolCall
from vla_rl.types.language import (
    ANY_REPLY,
    DEFAULT_AGENT,
    ChoiceFormat,
    GrammarFormat,
    JsonFormat,
    RegexFormat,
    ReplyFormat,
    ReplyOptions,
    ToolRule,
)
from vla_rl.types.observation import KEY_BYTES, ArrayRef, get_images, make_conversation_observation


def test_a_conversation_of_words_alone_has_no_keys_of_images() -> None:
    tokens = np.arange(3)
    seen = make_conversation_observation(tokens)
    assert seen == {"prompt_tokens": tokens}
    assert get_images(seen) == ()


def test_more_than_ten_images_keep_their_order() -> None:
    images = [np.full((1, 1, 3), number, np.uint8) for number in range(12)]
    seen = make_conversation_observation(np.arange(30), images, range(0, 24, 2))
    assert [int(image[0, 0, 0]) for image in get_images(seen)] == list(range(12))
    assert seen["image_starts"].dtype == np.int64
    assert seen["image_starts"].tolist() == list(range(0, 24, 2))


ARRAY = np.arange(12, dtype=np.int16).reshape(3, 4)


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    path = tmp_path / "image cache"
    path.write_bytes((77).to_bytes(KEY_BYTES, "little") + b"other" + ARRAY.tobytes())
    return path


def cached_images(path: Path, **changes) -> ArrayRef:
    fields = {
        "host": "",
        "path": str(path),
        "key": 77,
        "start": KEY_BYTES + 5,
        "dtype": "int16",
        "shape": (3, 4),
    } | changes
    return ArrayRef(**fields)


def test_the_array_is_read_from_its_place(memory: Path) -> None:
    found = cached_images(memory).read_array()
    assert found.dtype == np.int16
    np.testing.assert_array_equal(found, ARRAY)
    assert cached_images(memory).num_bytes == 24


def test_a_single_number_and_an_array_of_nothing_are_read_too(memory: Path) -> None:
    assert cached_images(memory, shape=()).read_array() == 0
    assert cached_images(memory, shape=(0, 4)).read_array().shape == (0, 4)


def test_memory_that_is_gone_is_an_error_that_says_so(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="are gone: the process that held them has ended"):
        cached_images(tmp_path / "none").read_array()


def test_memory_that_was_used_again_is_not_read_as_the_old_one(memory: Path) -> None:
    with pytest.raises(OSError, match="24 bytes of 77 at 13, expected 24 of 78"):
        cached_images(memory, key=78).read_array()


def test_memory_that_is_too_short_is_an_error(memory: Path) -> None:
    with pytest.raises(OSError, match="has 0 bytes of 77 at 15, expected 24"):
        cached_images(memory, start=KEY_BYTES + 7).read_array()


def test_an_array_larger_than_the_memory_is_refused_before_it_takes_any(memory: Path) -> None:
    with pytest.raises(OSError, match=f"expected {2 << 50} of 77"):
        cached_images(memory, shape=(1 << 50,)).read_array()


def test_a_type_that_ends_a_process_inside_numpy_is_refused(memory: Path) -> None:
    with pytest.raises(ValueError, match=r"dtype is 'M8\[s/0\]', expected one number"):
        cached_images(memory, dtype="M8[s/0]").read_array()


def test_it_goes_over_a_wire_as_it_is(memory: Path) -> None:
    sent = msgspec.msgpack.encode(cached_images(memory))
    assert msgspec.msgpack.decode(sent, type=ArrayRef) == cached_images(memory)


def test_a_message_with_tool_calls_is_the_same_after_it_was_sent() -> None:
    call = ToolCall(id="call_0", name="add", arguments='{"a": 1')
    message = Message(role="assistant", tool_calls=(call,), call_errors=("no JSON",))
    assert msgspec.json.decode(msgspec.json.encode(message), type=Message) == message


def test_turns_belong_to_the_one_agent_unless_they_name_another() -> None:
    asked = (Message(role="user", content="2 + 2?"),)
    assert TextStart(messages=asked).agent == DEFAULT_AGENT
    outcome = TextOutcome(messages=(), reward=1.0, terminated=True, truncated=False, info={})
    assert outcome.agent == DEFAULT_AGENT
    assert outcome.credits == {}


def test_a_completion_was_sampled_as_the_episode_says_unless_it_says_otherwise() -> None:
    reply = Completion(
        message=Message(role="assistant", content="4"),
        prompt_tokens=np.array([1, 2]),
        tokens=np.array([3]),
        log_probs=np.array([-0.1], np.float32),
        weight_versions=np.array([5]),
        finish_reason="stop",
    )
    assert (reply.temperature, reply.grammar, reply.stopped_by, reply.report) == (None,) * 4


@pytest.mark.parametrize(
    "format",
    [
        JsonFormat(schema={"type": "array"}, is_strict=False),
        RegexFormat(pattern="[0-9]+"),
        ChoiceFormat(choices=("yes", "no")),
        GrammarFormat(lark='start: "a"'),
    ],
)
def test_a_format_is_read_as_the_one_that_was_sent(format: ReplyFormat) -> None:
    options = ReplyOptions(format=format, stop=("\n",), tools=ToolRule(mode="none"))
    assert msgspec.json.decode(msgspec.json.encode(options), type=ReplyOptions) == options


def test_json_without_a_schema_is_any_object_and_two_formats_share_no_schema() -> None:
    first, second = JsonFormat(), JsonFormat()
    assert first.schema == {"type": "object"}
    assert first.schema is not second.schema


def test_without_rules_the_model_decides() -> None:
    assert (
        ReplyOptions(format=None, stop=(), tools=ToolRule(mode="auto", names=(), max_calls=None))
        == ANY_REPLY
    )
