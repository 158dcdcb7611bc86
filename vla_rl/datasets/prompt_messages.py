"""The prompt of a row as messages: a text, or messages in OpenAI's form.

    "What is 3+4?"
    [{"role": "user", "content": "What is 3+4?"}]
    [{"role": "user", "content": [{"type": "text", "text": "What is "}, {"type": "text", "text": "3+4?"}]}]
    [..., {"role": "assistant", "content": null, "tool_calls": [{"function": {"name": ..., "arguments": ...}}]}]

Parquet writes null for what a message lacks and another one has, so a null is the same as nothing.
"""

import functools
import json
import logging
from typing import Any, Final

import msgspec

from vla_rl.errors import DataError
from vla_rl.types import Message, ToolCall
from vla_rl.util.values import excerpt

logger = logging.getLogger(__name__)

UNREAD: Final = frozenset(
    {"images", "image", "videos", "video", "audios", "audio", "function_call", "refusal"}
)
"""Fields of a message that hold a part of it which no prompt here can have."""


class _Function(msgspec.Struct):
    name: str
    arguments: str | dict[str, Any] | None = None


class _Call(msgspec.Struct):
    """A call in OpenAI's form, or its function alone."""

    id: str | None = None
    type: str | None = None
    function: _Function | None = None
    name: str | None = None
    arguments: str | dict[str, Any] | None = None


class _Part(msgspec.Struct):
    type: str = "text"
    text: str | None = None


class _Said(msgspec.Struct):
    role: str
    content: str | list[_Part] | None = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None
    name: str | None = None


READ: Final = frozenset(field.name for field in msgspec.structs.fields(_Said)) | UNREAD


def first_messages(asked: Any, system: str, label: str) -> tuple[Message, ...]:
    """Return the first messages about a prompt: the system's, if there is one, and the prompt.

    Raises: DataError, with the label, if the prompt is neither text nor messages.
    """
    messages = prompt_messages(asked, label)
    return (Message(role="system", content=system), *messages) if system else messages


def prompt_messages(asked: Any, label: str) -> tuple[Message, ...]:
    """Return a prompt as messages; parts of text are joined, and tool calls kept.

    Args:
        asked: the prompt.
        label: names field, row and file in errors.

    Raises: DataError for anything else than text.
    """
    if isinstance(asked, str):
        return (Message(role="user", content=asked),)
    if not isinstance(asked, list) or not asked:
        raise DataError(
            f"{label} is neither a text nor a list of messages with role and content: it is "
            f"{excerpt(asked)}."
        )
    return tuple(
        _message(said, f"message {number} of {label}") for number, said in enumerate(asked)
    )


def _message(said: Any, label: str) -> Message:
    if not isinstance(said, dict) or said.get("role") is None:
        raise DataError(f"{label} is {excerpt(said)}, expected an object with role and content.")
    unread = sorted(name for name in UNREAD & said.keys() if said[name] not in (None, [], ""))
    if unread:
        raise DataError(
            f"{label} has {', '.join(map(repr, unread))}, expected text and tool calls alone; write "
            "what the policy should read into its content."
        )
    for name in sorted(map(str, said.keys() - READ)):
        if said[name] is not None:
            _warn_of_unread(name)
    try:
        read = msgspec.convert(said, _Said)
    except (msgspec.ValidationError, RecursionError) as error:
        raise DataError(f"{label} is not a message with role and content: {error}.") from error
    calls = tuple(_call(call, number, label) for number, call in enumerate(read.tool_calls or ()))
    if calls and read.role != "assistant":
        raise DataError(
            f"{label} has tool calls and the role {read.role!r}, expected them of an assistant."
        )
    if read.content is None and not calls:
        raise DataError(
            f"{label} has no content, expected a text; only an assistant's message with tool_calls "
            "may have none."
        )
    return Message(
        role=read.role,
        content=_text(read.content, label),
        tool_calls=calls,
        tool_call_id=read.tool_call_id,
        name=read.name,
    )


@functools.lru_cache(maxsize=64)
def _warn_of_unread(name: str) -> None:
    """Warn, once for each field."""
    logger.warning(
        "the field %r of a prompt's messages is not read; the policy does not see it", name
    )


def _text(content: str | list[_Part] | None, label: str) -> str:
    if not isinstance(content, list):
        return content or ""
    for number, part in enumerate(content):
        if part.type not in ("text", "input_text", "output_text") or part.text is None:
            raise DataError(
                f"part {number} of {label} is of the type {part.type!r}"
                f"{' without text' if part.text is None else ''}, expected parts of text alone; "
                "leave the row out."
            )
    return "".join(part.text or "" for part in content)


def _call(call: _Call, number: int, label: str) -> ToolCall:
    function = call.function
    if function is None and call.name is not None:
        function = _Function(call.name, call.arguments)
    if function is None or call.type not in (None, "function"):
        raise DataError(
            f"tool call {number} of {label} is no call of a function, expected "
            '{"function": {"name": ..., "arguments": ...}}.'
        )
    arguments = function.arguments
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments or {}, ensure_ascii=False)
    try:
        is_object = isinstance(json.loads(arguments), dict)
    except (ValueError, RecursionError):
        is_object = False
    if not is_object:
        raise DataError(
            f"the arguments of tool call {number} of {label} are {excerpt(arguments)}, expected a "
            "JSON object."
        )
    return ToolCall(
        id=f"call_{number}" if call.id is None else call.id,
        name=function.name,
        arguments=arguments,
    )
