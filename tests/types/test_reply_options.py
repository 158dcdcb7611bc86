"""Rules of a reply keep their kind in a message."""

import msgspec
import pytest

from vla_rl.types.reply_options import (
    ANY_REPLY,
    ChoiceFormat,
    GrammarFormat,
    JsonFormat,
    RegexFormat,
    ReplyFormat,
    ReplyOptions,
    ToolRule,
)


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
