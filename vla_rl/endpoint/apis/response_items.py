"""Items of `/v1/responses` as messages: texts, function calls and their outputs.

message(assistant), function_call, function_call ─► one message of the assistant with two calls
function_call_output                             ─► one message of a tool
"""

from collections.abc import Sequence
from typing import Final

import msgspec

from vla_rl.endpoint.apis.fields import refuse
from vla_rl.endpoint.errors import RequestError
from vla_rl.types import Message, ToolCall

_TEXTS: Final = ("input_text", "output_text", "text", "refusal")
_ROLES: Final = {
    "user": "user",
    "assistant": "assistant",
    "system": "system",
    "developer": "system",
}


class Part(msgspec.Struct):
    """A part of an item's content."""

    type: str
    text: str | None = None
    refusal: str | None = None


class Item(msgspec.Struct):
    """One item of the input; its type determines which fields are read."""

    type: str = "message"
    role: str | None = None
    content: str | list[Part] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[Part] | None = None


def messages_of(given: str | Sequence[Item]) -> list[Message]:
    """Convert items into a conversation.

    Raises: RequestError, naming the item, if one does not fit.
    """
    if isinstance(given, str):
        return [Message(role="user", content=given)] if given else []
    messages: list[Message] = []
    for number, item in enumerate(given):
        name = f"input[{number}]"
        if item.type == "message":
            messages.append(_message(name, item))
        elif item.type == "function_call":
            _add_call(messages, name, item)
        elif item.type == "function_call_output":
            call_id = _required(name, "call_id", item.call_id)
            messages.append(
                Message(
                    role="tool", content=_text(f"{name}.output", item.output), tool_call_id=call_id
                )
            )
        elif item.type != "reasoning":  # the policy produces none, so another model's is ignored
            raise refuse(
                f"{name}.type",
                item.type,
                "message, function_call, function_call_output or reasoning",
            )
    return messages


def _message(name: str, item: Item) -> Message:
    if item.role not in _ROLES:
        raise refuse(f"{name}.role", item.role, f"one of {', '.join(_ROLES)}")
    return Message(role=_ROLES[item.role], content=_text(f"{name}.content", item.content))


def _add_call(messages: list[Message], name: str, item: Item) -> None:
    """Add a call to the assistant's message right before it, or to a new one."""
    call = ToolCall(
        id=_required(name, "call_id", item.call_id),
        name=_required(name, "name", item.name),
        arguments=item.arguments or "{}",
    )
    if messages and messages[-1].role == "assistant":
        messages[-1] = msgspec.structs.replace(
            messages[-1], tool_calls=(*messages[-1].tool_calls, call)
        )
    else:
        messages.append(Message(role="assistant", tool_calls=(call,)))


def _text(name: str, content: str | list[Part] | None) -> str:
    if not isinstance(content, list):
        return content or ""
    for number, part in enumerate(content):
        if part.type not in _TEXTS:
            raise refuse(f"{name}[{number}].type", part.type, "text: the policy sees nothing else")
    return "".join(part.text or part.refusal or "" for part in content)


def _required(name: str, field: str, value: str | None) -> str:
    if value is None:
        raise RequestError(f"{name}.{field} is missing", param=f"{name}.{field}")
    return value
