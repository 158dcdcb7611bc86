"""Rules for replies are read from a request, and what is not supported is refused by name."""

from typing import Any

import pytest

from vla_rl.endpoint.api import (
    MAX_STOPS,
    Function,
    JsonSchema,
    StructuredOutputs,
    read_stop_texts,
    read_text_format,
    read_tool_rule,
    require_range,
)
from vla_rl.endpoint.http import RequestError
from vla_rl.types import (
    ChoiceFormat,
    GrammarFormat,
    JsonFormat,
    RegexFormat,
    ToolRule,
    ToolSpec,
)

TOOLS = tuple(ToolSpec(name=name, description="", parameters={}) for name in ("add", "sub"))
ADD = {"type": "function", "name": "add"}


@pytest.mark.parametrize(
    ("choice", "parallel", "expected"),
    [
        (None, None, ToolRule()),
        ("auto", True, ToolRule()),
        ("none", None, ToolRule(mode="none")),
        ("required", False, ToolRule(mode="required", max_calls=1)),
        (ADD, None, ToolRule(mode="required", names=("add",), max_calls=1)),
        (
            {"type": "function", "function": {"name": "add"}},
            None,
            ToolRule(mode="required", names=("add",), max_calls=1),
        ),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [ADD]},
            None,
            ToolRule(mode="required", names=("add",)),
        ),
        (
            {"type": "allowed_tools", "allowed_tools": {"tools": [ADD]}},
            False,
            ToolRule(mode="auto", names=("add",), max_calls=1),
        ),
    ],
)
def test_a_choice_of_tools_is_read_in_every_form(
    choice: Any, parallel: bool | None, expected: ToolRule
) -> None:
    assert read_tool_rule("tool_choice", choice, parallel, TOOLS) == expected


@pytest.mark.parametrize(
    ("choice", "tools", "message"),
    [
        ("required", (), "tool_choice is 'required', expected 'auto' or 'none' without tools"),
        ("any", TOOLS, "tool_choice is 'any', expected 'auto', 'none', 'required', a function"),
        (7, TOOLS, "tool_choice is 7, expected"),
        ({"type": "custom"}, TOOLS, "expected 'auto', 'none', 'required', a function"),
        ({**ADD, "name": "mul"}, TOOLS, r"is 'mul', expected the name of a tool .*'add', 'sub'"),
        (
            {"type": "allowed_tools", "mode": "none", "tools": [ADD]},
            TOOLS,
            "tool_choice.mode is 'none', expected 'auto' or 'required'",
        ),
    ],
)
def test_a_choice_that_is_not_supported_is_refused(
    choice: Any, tools: tuple[ToolSpec, ...], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        read_tool_rule("tool_choice", choice, None, tools)


def test_without_tools_no_number_of_calls_is_bounded() -> None:
    assert read_tool_rule("tool_choice", None, False, ()) == ToolRule()


def test_a_function_without_words_or_parameters_is_a_tool_too() -> None:
    assert Function(name="now", strict=True).spec() == ToolSpec(
        name="now", description="", parameters={}, is_strict=True
    )


def test_a_text_has_any_format_json_or_that_of_a_schema() -> None:
    schema = JsonSchema(schema={"type": "object"}, strict=True)
    assert read_text_format("response_format", "text", None) is None
    assert read_text_format("response_format", "json_object", None) == JsonFormat()
    assert read_text_format("response_format", "json_schema", schema) == JsonFormat(
        schema={"type": "object"}, is_strict=True
    )
    with pytest.raises(RequestError, match=r"response_format.json_schema is missing"):
        read_text_format("response_format", "json_schema", None)
    with pytest.raises(RequestError, match=r"response_format.type is 'xml', expected 'text'"):
        read_text_format("response_format", "xml", None)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"json": {"type": "array"}}, JsonFormat(schema={"type": "array"})),
        ({"regex": "a+"}, RegexFormat(pattern="a+")),
        ({"choice": ["yes", "no"]}, ChoiceFormat(choices=("yes", "no"))),
        ({"grammar": "start: A"}, GrammarFormat(lark="start: A")),
    ],
)
def test_structured_outputs_have_one_form(fields: dict[str, Any], expected: Any) -> None:
    assert StructuredOutputs(**fields).format() == expected


@pytest.mark.parametrize("fields", [{}, {"regex": "a", "choice": ["a"]}])
def test_structured_outputs_of_no_form_or_of_two_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=f"has {len(fields)} of json, regex, choice and grammar"):
        StructuredOutputs(**fields).format()


def test_stop_texts_are_one_or_some_and_none_is_empty() -> None:
    assert read_stop_texts(None) == ()
    assert read_stop_texts("END") == ("END",)
    assert read_stop_texts(["a", "b"]) == ("a", "b")
    for empty in ("", ["a", ""]):
        with pytest.raises(RequestError, match="expected texts of at least one character"):
            read_stop_texts(empty)
    with pytest.raises(RequestError, match="stop is 17, expected at most 16 texts"):
        read_stop_texts(["x"] * (MAX_STOPS + 1))


def test_a_number_is_in_its_range_or_not_given() -> None:
    require_range("n", None, 1, 1)
    require_range("n", 1, 1, 1)
    require_range("n", 99, 1)
    with pytest.raises(RequestError, match="n is 2, expected 1 to 1"):
        require_range("n", 2, 1, 1)
    with pytest.raises(RequestError, match="n is 0, expected at least 1"):
        require_range("n", 0, 1)
