"""A request is decoded field by field; what is wrong or not supported is refused by name."""

from typing import Any

import msgspec
import pytest

from vla_rl.endpoint.api import (
    MAX_NAMED,
    MAX_STOPS,
    Function,
    JsonSchema,
    StructuredOutputs,
    read_fields,
    read_stop_texts,
    read_text_format,
    read_tool_rule,
    reject_value,
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


class Message(msgspec.Struct):
    role: str


class Request(msgspec.Struct):
    model: str
    messages: list[Message] | None = None
    n: int = 1


def read(body: Any) -> tuple[Request, tuple[str, ...]]:
    return read_fields(body if isinstance(body, bytes) else msgspec.json.encode(body), Request)


def test_a_null_counts_as_a_missing_field() -> None:
    found, unused = read({"model": "m", "n": None, "messages": None, "user": None})
    assert found == Request(model="m")
    assert unused == ()
    with pytest.raises(RequestError, match="model is missing") as caught:
        read({"model": None})
    assert caught.value.param == "model"


def test_fields_that_are_not_read_are_named_and_not_decoded() -> None:
    _, unused = read(b'{"model": "m", "user": "me", "logit_bias": {"5": 1e999}}')
    assert unused == ("user", "logit_bias")


def test_names_of_unread_fields_fit_a_header() -> None:
    names = {"x" * 100: 1, "zei\nle": 1, "größe": 1} | {f"f{number}": 1 for number in range(50)}
    _, unused = read({"model": "m"} | names)
    assert unused[:3] == ("x" * 64, "zei\\nle", "gr\\xf6\\xdfe")
    assert len(unused) == MAX_NAMED


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": "two"}, "n"),
        ({"messages": [{"role": "user"}, {"role": 3}]}, "messages[1]"),
        ({"messages": {"role": "user"}}, "messages"),
        ({"messages": ["hello"]}, "messages[0]"),
    ],
)
def test_a_value_of_another_type_is_refused_with_its_place(fields: Any, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        read({"model": "m"} | fields)
    assert (caught.value.param, caught.value.code) == (param, "invalid_type")
    assert str(caught.value).startswith(f"{param}: ")


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"model": }', b"\xff", b"[" * 10_000])
def test_a_body_that_is_no_object_is_refused(body: bytes) -> None:
    with pytest.raises(RequestError, match="the body is not a JSON object") as caught:
        read(body)
    assert (caught.value.code, caught.value.status) == ("invalid_json", 400)


def test_text_that_is_no_utf8_and_lists_in_lists_are_errors_of_their_field() -> None:
    for raw in (b'"\xff"', b"[" * 10_000):
        with pytest.raises(RequestError) as caught:
            read(b'{"model": ' + raw + b"}")
        assert caught.value.status == 400


def test_a_refused_value_is_shown_and_cut_off() -> None:
    error = reject_value("stop", "x" * 500, "at most 16 texts")
    assert str(error) == f"stop is '{'x' * 116}..., expected at most 16 texts"
    assert (error.param, error.code) == ("stop", "unsupported_value")


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
