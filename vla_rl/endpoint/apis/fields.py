"""Fields of a JSON request, decoded one by one, so that an error names the field.

A null counts as a missing field. Fields that are not read are skipped without decoding. A long list
is decoded item by item, so that other threads can run in between.
"""

import functools
import json
from types import UnionType
from typing import Any, Final, TypeVar, Union, get_args, get_origin

import msgspec

from vla_rl.endpoint.errors import RequestError
from vla_rl.util.foreign_data import repair_unicode
from vla_rl.util.values import excerpt

MOST_NAMED: Final = 32
"""Most ignored fields that the answer's header names."""

T = TypeVar("T", bound=msgspec.Struct)


def read_fields(body: bytes, request: type[T]) -> tuple[T, tuple[str, ...]]:
    """Return a request, and the names of the unread fields in a form that fits a header.

    Half a surrogate pair in a text, which a client may have read on a page, becomes U+FFFD.

    Raises: RequestError.
    """
    try:
        return _read(body, request)
    except RequestError:
        repaired = _with_whole_characters(body)
        if repaired is None:
            raise
    return _read(repaired, request)


def _with_whole_characters(body: bytes) -> bytes | None:
    """Return the body without halves of surrogate pairs; None if it has none, or is not JSON."""
    if b"\\ud" not in body.lower():
        return None
    try:
        return repair_unicode(json.dumps(json.loads(body), ensure_ascii=False)).encode()
    except (ValueError, RecursionError):
        return None


def _read(body: bytes, request: type[T]) -> tuple[T, tuple[str, ...]]:
    try:
        given = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise RequestError(
            f"the body is not a JSON object: {error}", code="invalid_json"
        ) from error
    values = {}
    for field in msgspec.structs.fields(request):
        raw = given.pop(field.encode_name, None)
        if raw is not None and bytes(raw) != b"null":
            values[field.name] = _decoded(field.encode_name, bytes(raw), field.type)
        elif field.required:
            raise RequestError(f"{field.encode_name} is missing", param=field.encode_name)
    unread = [ascii(name)[1:-1][:64] for name, raw in given.items() if bytes(raw) != b"null"]
    return request(**values), tuple(unread[:MOST_NAMED])


def refuse(
    param: str, value: object, expected: str, code: str = "unsupported_value"
) -> RequestError:
    """Return the error for one value."""
    try:
        shown = repr(value)
    except RecursionError:
        shown = excerpt(value)
    return RequestError(
        f"{param} is {shown if len(shown) <= 120 else shown[:117] + '...'}, expected {expected}",
        param=param,
        code=code,
    )


def _decoded(name: str, raw: bytes, kind: Any) -> Any:
    item = _item_type(kind)
    if item is None or raw[:1] != b"[":
        return _one(name, raw, kind)
    return [
        _one(f"{name}[{number}]", bytes(each), item)
        for number, each in enumerate(_one(name, raw, list[msgspec.Raw]))
    ]


def _one(name: str, raw: bytes, kind: Any) -> Any:
    try:
        return _decoder(kind).decode(raw)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise RequestError(f"{name}: {error}", param=name, code="invalid_type") from error


def _item_type(kind: Any) -> Any:
    """Return the type of the items, if `kind` is a list or may be one."""
    choices = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    return next((get_args(each)[0] for each in choices if get_origin(each) is list), None)


@functools.cache
def _decoder(kind: Any) -> "msgspec.json.Decoder[Any]":
    return msgspec.json.Decoder(kind)
