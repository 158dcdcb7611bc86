"""A request is decoded field by field, and an error names the field."""

from typing import Any

import msgspec
import pytest

from vla_rl.endpoint.api import MAX_NAMED, read_fields, reject_value
from vla_rl.endpoint.http import RequestError


class Message(msgspec.Struct):
    role: str


class Request(msgspec.Struct):
    model: str
    messages: list[Message] | None = None
    n: int = 1


def read(body: Any) -> tuple[Request, tuple[str, ...]]:
    return read_fields(body if isinstance(body, bytes) else msgspec.json.encode(body), Request)


def test_a_null_counts_as_a_missing_field() -> None:
    found, unread = read({"model": "m", "n": None, "messages": None, "user": None})
    assert found == Request(model="m")
    assert unread == ()
    with pytest.raises(RequestError, match="model is missing") as caught:
        read({"model": None})
    assert caught.value.param == "model"


def test_fields_that_are_not_read_are_named_and_not_decoded() -> None:
    _, unread = read(b'{"model": "m", "user": "me", "logit_bias": {"5": 1e999}}')
    assert unread == ("user", "logit_bias")


def test_names_of_unread_fields_fit_a_header() -> None:
    names = {"x" * 100: 1, "zei\nle": 1, "größe": 1} | {f"f{number}": 1 for number in range(50)}
    _, unread = read({"model": "m"} | names)
    assert unread[:3] == ("x" * 64, "zei\\nle", "gr\\xf6\\xdfe")
    assert len(unread) == MAX_NAMED


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
