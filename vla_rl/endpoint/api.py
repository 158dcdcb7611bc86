"""The base of all APIs: it reads their requests.

    body ─► `ReadRequest` of its path ─► ApiRequest ─► .asked ─► (the policy generates) ─► .write_body or .stream_events

Fields of a JSON request are decoded one by one, so that an error names the field. A null counts as a
missing field. Fields that are not read are skipped without decoding. A long list is decoded item by item,
so that other threads can run in between.

`chat/completions` and `responses` nest the same rules for replies (tools, which of them to call, format,
stop texts) differently; they are interpreted here.
"""

import functools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from types import UnionType
from typing import Any, Final, Protocol, TypeAlias, TypeVar, Union, get_args, get_origin

import msgspec

from vla_rl.endpoint.http import RequestError
from vla_rl.types import (
    ANY_REPLY,
    ChoiceFormat,
    Completion,
    GrammarFormat,
    JsonFormat,
    Message,
    Prompt,
    RegexFormat,
    ReplyFormat,
    ReplyOptions,
    ToolRule,
    ToolSpec,
)
from vla_rl.util.foreign_data import repair_unicode
from vla_rl.util.values import excerpt


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """A request to the policy, from any API.

    Example:
        Asked(prompts=((Message(role="user", content="2 + 2?"),),), model="gpt-5", max_tokens=64)
    """

    prompts: tuple[Prompt, ...]
    """Prompts of the request: one for a conversation; text completions may have several."""

    model: str = ""
    tools: tuple[ToolSpec, ...] = ()
    options: ReplyOptions = ANY_REPLY

    max_tokens: int | None = None
    """Most tokens of a reply; None: no limit in the request."""

    num_choices: int = 1
    """Replies to each prompt."""

    stream: bool = False
    """Answer with events instead of one body."""

    ignored: tuple[str, ...] = ()
    """Names of the request's fields that were not read."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """The policy's replies to one request."""

    number: str
    """Number of the answer, unique at this endpoint; part of all ids."""

    model: str
    """Name of the model in the request."""

    replies: tuple[Completion, ...]
    """Replies, prompt by prompt, `num_choices` for each."""

    created: int = msgspec.field(default_factory=lambda: int(time.time()))


class ApiRequest(Protocol):
    """One request after it was read."""

    @property
    def asked(self) -> Asked:
        """The request to the policy."""
        ...

    def write_body(self, answer: Answer) -> dict[str, Any]:
        """Return the body of the answer."""
        ...

    def stream_events(self, answer: Answer) -> Iterator[bytes]:
        """Yield the same answer as server-sent events."""
        ...


class Memory(Protocol):
    """Conversations that a later request may continue by the id of an answer."""

    def recall(self, answer_id: str) -> Sequence[Message] | None:
        """Return the conversation up to that answer; None if there is none."""
        ...

    def store_conversation(self, answer_id: str, conversation: Sequence[Message]) -> None:
        """Store a conversation until the session ends."""
        ...


ReadRequest: TypeAlias = Callable[[bytes, Memory], ApiRequest]
"""Reads a request of one API, in any thread. Raises: RequestError if it is invalid or not supported."""


def encode_body(body: dict[str, Any]) -> bytes:
    """Encode an answer as JSON; half a surrogate pair of a policy becomes U+FFFD."""
    try:
        return msgspec.json.encode(body)
    except UnicodeEncodeError:
        return repair_unicode(json.dumps(body, ensure_ascii=False)).encode()


def make_data_event(body: dict[str, Any]) -> bytes:
    """Encode a server-sent event without a name."""
    return b"data: " + encode_body(body) + b"\n\n"


def make_named_event(body: dict[str, Any]) -> bytes:
    """Encode a server-sent event that is named by the `type` of its body."""
    return f"event: {body['type']}\n".encode() + make_data_event(body)


MAX_NAMED: Final = 32
"""Most ignored fields that the answer's header names."""

T = TypeVar("T", bound=msgspec.Struct)


def read_fields(body: bytes, request: type[T]) -> tuple[T, tuple[str, ...]]:
    """Return a request, and the names of the unread fields in a form that fits a header.

    Half a surrogate pair in a text, which a client may have read on a page, becomes U+FFFD.

    Raises: RequestError.
    """
    try:
        return _read_fields(body, request)
    except RequestError:
        repaired = _repair_characters(body)
        if repaired is None:
            raise
    return _read_fields(repaired, request)


def _repair_characters(body: bytes) -> bytes | None:
    """Return the body without halves of surrogate pairs; None if it has none, or is not JSON."""
    # Most wrong requests have no such escape, and need not be parsed a second time.
    if b"\\ud" not in body.lower():
        return None
    try:
        return repair_unicode(json.dumps(json.loads(body), ensure_ascii=False)).encode()
    except (ValueError, RecursionError):
        return None


def _read_fields(body: bytes, request: type[T]) -> tuple[T, tuple[str, ...]]:
    try:
        # Raw values: a field that is not read must not fail the request, whatever a client put into
        # it.
        given = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise RequestError(
            f"the body is not a JSON object: {error}", code="invalid_json"
        ) from error
    values = {}
    for field in msgspec.structs.fields(request):
        raw = given.pop(field.encode_name, None)
        if raw is not None and bytes(raw) != b"null":
            values[field.name] = _decode_field(field.encode_name, bytes(raw), field.type)
        elif field.required:
            raise RequestError(f"{field.encode_name} is missing", param=field.encode_name)
    unused = [ascii(name)[1:-1][:64] for name, raw in given.items() if bytes(raw) != b"null"]
    return request(**values), tuple(unused[:MAX_NAMED])


def reject_value(
    param: str, value: object, expected: str, code: str = "unsupported_value"
) -> RequestError:
    """Return the error for one value."""
    try:
        # A value may be nested so deeply that Python cannot even write it down.
        shown = repr(value)
    except RecursionError:
        shown = excerpt(value)
    return RequestError(
        f"{param} is {shown if len(shown) <= 120 else shown[:117] + '...'}, expected {expected}",
        param=param,
        code=code,
    )


def _decode_field(name: str, raw: bytes, kind: Any) -> Any:
    item = _get_item_type(kind)
    if item is None or raw[:1] != b"[":
        return _decode_value(name, raw, kind)
    return [
        _decode_value(f"{name}[{number}]", bytes(each), item)
        for number, each in enumerate(_decode_value(name, raw, list[msgspec.Raw]))
    ]


def _decode_value(name: str, raw: bytes, kind: Any) -> Any:
    try:
        return _make_decoder(kind).decode(raw)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise RequestError(f"{name}: {error}", param=name, code="invalid_type") from error


def _get_item_type(kind: Any) -> Any:
    """Return the type of the items, if `kind` is a list or may be one."""
    choices = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    return next((get_args(each)[0] for each in choices if get_origin(each) is list), None)


@functools.cache
def _make_decoder(kind: Any) -> "msgspec.json.Decoder[Any]":
    return msgspec.json.Decoder(kind)


MAX_STOPS: Final = 16
MAX_CHOICES: Final = 128
MAX_ALTERNATIVES: Final = 20


class Function(msgspec.Struct):
    """A tool in OpenAI's format."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def spec(self) -> ToolSpec:
        """Return the tool in the types of vla_rl."""
        return ToolSpec(
            name=self.name,
            description=self.description or "",
            parameters=self.parameters or {},
            is_strict=bool(self.strict),
        )


class JsonSchema(msgspec.Struct):
    """The schema of a structured output, in OpenAI's format."""

    name: str = ""
    schema: dict[str, Any] | None = None
    strict: bool | None = None

    def format(self) -> JsonFormat:
        """The form of a reply."""
        if self.schema is None:
            return JsonFormat()
        # Enforced without `strict` too; `strict` only decides whether a keyword that no grammar can
        # express is refused or left out.
        return JsonFormat(schema=self.schema, is_strict=bool(self.strict))


def read_tool_rule(
    param: str, choice: Any, parallel: bool | None, tools: tuple[ToolSpec, ...]
) -> ToolRule:
    """Return the tools that a reply may call.

    Args:
        param: name of the field, for errors.
        choice: "auto", "none", "required", one named function, or a list of allowed ones; functions
            are named at the top, or one level below under "function".
        parallel: whether one reply may hold several calls; None: yes.
        tools: the tools of the request.

    Raises: RequestError, naming the missing tool or the unsupported choice.
    """
    max_calls = 1 if parallel is False and tools else None
    if choice is None or choice in ("auto", "none", "required"):
        if choice == "required" and not tools:
            raise reject_value(
                param, choice, "'auto' or 'none' without tools; give at least one tool"
            )
        return ToolRule(mode=choice or "auto", max_calls=max_calls)
    mode: Any = "required"
    named: Any = [choice]
    kind = choice.get("type") if isinstance(choice, dict) else None
    # OpenAI nests the list in chat completions and writes it flat in responses.
    if kind == "allowed_tools":
        allowed = choice.get("allowed_tools", choice)
        if not isinstance(allowed, dict):
            raise reject_value(f"{param}.allowed_tools", allowed, "an object with mode and tools")
        mode, named = allowed.get("mode", "auto"), allowed.get("tools", [])
        if not isinstance(named, list):
            raise reject_value(f"{param}.tools", named, "a list of tools")
    elif kind == "function":
        max_calls = 1
    else:
        raise reject_value(param, choice, "'auto', 'none', 'required', a function or allowed_tools")
    names = tuple(_get_tool_name(param, each) for each in named)
    known = {tool.name: None for tool in tools}
    for name in names:
        if name not in known:
            raise reject_value(
                param,
                name,
                f"the name of a tool of this request, which are {excerpt(list(known))}",
            )
    if mode not in ("auto", "required"):
        raise reject_value(f"{param}.mode", mode, "'auto' or 'required'")
    return ToolRule(mode=mode, names=names, max_calls=max_calls)


def _get_tool_name(param: str, named: Any) -> str:
    """Return the name of a tool in a choice, at its top or below "function"."""
    function = named.get("function", named) if isinstance(named, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise reject_value(param, named, 'a tool such as {"type": "function", "name": ...}')
    return name


def read_text_format(param: str, kind: str, schema: JsonSchema | None) -> ReplyFormat | None:
    """Return the format in `response_format` or `text.format`.

    Raises: RequestError for an unknown one.
    """
    if kind == "text":
        return None
    if kind == "json_object":
        return JsonFormat()
    if kind == "json_schema":
        if schema is None:
            raise RequestError(f"{param}.json_schema is missing", param=f"{param}.json_schema")
        return schema.format()
    raise reject_value(f"{param}.type", kind, "'text', 'json_object' or 'json_schema'")


class StructuredOutputs(msgspec.Struct):
    """vLLM's extension of OpenAI's API; exactly one field is set."""

    json: dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None

    def format(self) -> ReplyFormat:
        """Return the format of a reply. Raises: RequestError unless exactly one field is set."""
        found: list[ReplyFormat] = []
        if self.json is not None:
            found.append(JsonFormat(schema=self.json))
        if self.regex is not None:
            found.append(RegexFormat(pattern=self.regex))
        if self.choice is not None:
            if not self.choice:
                raise reject_value("structured_outputs.choice", [], "at least one text")
            found.append(ChoiceFormat(choices=tuple(self.choice)))
        if self.grammar is not None:
            found.append(GrammarFormat(lark=self.grammar))
        if len(found) != 1:
            raise RequestError(
                f"structured_outputs has {len(found)} of json, regex, choice and grammar, "
                "expected one",
                param="structured_outputs",
            )
        return found[0]


def read_stop_texts(stop: str | list[str] | None) -> tuple[str, ...]:
    """Return the texts that end a reply. Raises: RequestError for too many or an empty one."""
    texts = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(texts) > MAX_STOPS:
        raise reject_value("stop", len(texts), f"at most {MAX_STOPS} texts")
    if "" in texts:
        raise reject_value("stop", "", "texts of at least one character")
    return texts


def require_range(param: str, value: int | None, least: int, most: int | None = None) -> None:
    """Raise RequestError if a number is given and out of its range."""
    if value is not None and (value < least or (most is not None and value > most)):
        raise reject_value(
            param, value, f"at least {least}" if most is None else f"{least} to {most}"
        )
