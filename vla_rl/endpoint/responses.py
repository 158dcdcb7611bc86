"""`/v1/responses`: conversations in the format of OpenAI's newer API, a list of items.

    message(assistant), function_call, function_call ─► one message of the assistant with two calls
    function_call_output                             ─► one message of a tool

An answer can be continued with `previous_response_id` until its session ends, unless `store` is
false. As with OpenAI, the instructions of earlier requests are not carried over.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Final, Literal

import msgspec

from vla_rl.endpoint.answers import (
    RequestEcho,
    make_stored_message,
    stream_response,
    write_response,
)
from vla_rl.endpoint.api import (
    MAX_ALTERNATIVES,
    Answer,
    Asked,
    Function,
    JsonSchema,
    Memory,
    StructuredOutputs,
    read_fields,
    read_text_format,
    read_tool_rule,
    reject_value,
    require_range,
)
from vla_rl.endpoint.http import RequestError
from vla_rl.types import Message, ReplyFormat, ReplyOptions, ToolCall

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


def read_messages(given: str | Sequence[Item]) -> list[Message]:
    """Convert items into a conversation.

    Raises: RequestError, naming the item, if one does not fit.
    """
    if isinstance(given, str):
        return [Message(role="user", content=given)] if given else []
    messages: list[Message] = []
    for number, item in enumerate(given):
        name = f"input[{number}]"
        if item.type == "message":
            messages.append(_read_message(name, item))
        elif item.type == "function_call":
            _add_call(messages, name, item)
        elif item.type == "function_call_output":
            call_id = _require_field(name, "call_id", item.call_id)
            messages.append(
                Message(
                    role="tool",
                    content=_read_text(f"{name}.output", item.output),
                    tool_call_id=call_id,
                )
            )
        elif item.type != "reasoning":  # the policy produces none, so another model's is ignored
            raise reject_value(
                f"{name}.type",
                item.type,
                "message, function_call, function_call_output or reasoning",
            )
    return messages


def _read_message(name: str, item: Item) -> Message:
    if item.role not in _ROLES:
        raise reject_value(f"{name}.role", item.role, f"one of {', '.join(_ROLES)}")
    return Message(role=_ROLES[item.role], content=_read_text(f"{name}.content", item.content))


def _add_call(messages: list[Message], name: str, item: Item) -> None:
    """Add a call to the assistant's message right before it, or to a new one."""
    call = ToolCall(
        id=_require_field(name, "call_id", item.call_id),
        name=_require_field(name, "name", item.name),
        arguments=item.arguments or "{}",
    )
    # Each call is an item of its own here; in messages of their own a chat template would end the
    # turn after the first one.
    if messages and messages[-1].role == "assistant":
        messages[-1] = msgspec.structs.replace(
            messages[-1], tool_calls=(*messages[-1].tool_calls, call)
        )
    else:
        messages.append(Message(role="assistant", tool_calls=(call,)))


def _read_text(name: str, content: str | list[Part] | None) -> str:
    if not isinstance(content, list):
        return content or ""
    for number, part in enumerate(content):
        if part.type not in _TEXTS:
            raise reject_value(
                f"{name}[{number}].type", part.type, "text: the policy sees nothing else"
            )
    return "".join(part.text or part.refusal or "" for part in content)


def _require_field(name: str, field: str, value: str | None) -> str:
    if value is None:
        raise RequestError(f"{name}.{field} is missing", param=f"{name}.{field}")
    return value


LOG_PROBS: Final = "message.output_text.logprobs"
"""Entry of `include` that requests the log-probs of the text."""


class _Tool(Function):
    type: Literal["function"] = "function"


class _TextFormat(JsonSchema):
    type: str = "text"


class _Text(msgspec.Struct):
    format: _TextFormat | None = None


class ResponseFields(msgspec.Struct):
    """The fields of a request that are read."""

    input: str | list[Item] = ""
    model: str = ""
    instructions: str | None = None
    tools: list[_Tool] = []
    tool_choice: Any = "auto"
    parallel_tool_calls: bool | None = None
    max_output_tokens: int | None = None
    stream: bool = False
    text: _Text | None = None
    structured_outputs: StructuredOutputs | None = None
    previous_response_id: str | None = None
    store: bool = True
    include: list[str] = []
    top_logprobs: int | None = None
    metadata: dict[str, str] = {}
    background: bool = False
    conversation: Any = None
    prompt: Any = None
    truncation: str = "disabled"


class ResponseRequest:
    """A request for a response."""

    def __init__(self, fields: ResponseFields, ignored: tuple[str, ...], memory: Memory) -> None:
        _reject_unsupported(fields)
        tools = tuple(tool.spec() for tool in fields.tools)
        self._memory, self._stores = memory, fields.store
        self._conversation = [
            *_recall_conversation(fields.previous_response_id, memory),
            *read_messages(fields.input),
        ]
        if not self._conversation:
            raise RequestError(
                "input is empty, expected a text or at least one item", param="input"
            )
        # OpenAI has both ways of asking for them.
        self._has_log_probs = LOG_PROBS in fields.include or fields.top_logprobs is not None
        self._echo = RequestEcho(
            instructions=fields.instructions,
            max_output_tokens=fields.max_output_tokens,
            metadata=fields.metadata,
            parallel_tool_calls=fields.parallel_tool_calls is not False,
            previous_response_id=fields.previous_response_id,
            store=fields.store,
            text={"format": {"type": "text"}}
            if fields.text is None
            else msgspec.to_builtins(fields.text),
            tool_choice=fields.tool_choice,
            tools=[msgspec.to_builtins(tool) for tool in fields.tools],
        )
        system = (
            []
            if fields.instructions is None
            else [Message(role="system", content=fields.instructions)]
        )
        self.asked = Asked(
            prompts=((*system, *self._conversation),),
            model=fields.model,
            tools=() if fields.tool_choice == "none" else tools,
            options=ReplyOptions(
                format=_read_format(fields),
                tools=read_tool_rule(
                    "tool_choice", fields.tool_choice, fields.parallel_tool_calls, tools
                ),
                top_log_probs=(fields.top_logprobs or 0) if self._has_log_probs else None,
            ),
            max_tokens=fields.max_output_tokens,
            stream=fields.stream,
            ignored=ignored,
        )

    def write_body(self, answer: Answer) -> dict[str, Any]:
        """Return a `response`."""
        return self._completed(answer)

    def stream_events(self, answer: Answer) -> Iterator[bytes]:
        """Yield the same, as the events that build up a response."""
        return stream_response(self._completed(answer))

    def _completed(self, answer: Answer) -> dict[str, Any]:
        body = write_response(answer, self._echo, has_log_probs=self._has_log_probs)
        # Only once the answer is written: a request that fails leaves nothing to continue from.
        if self._stores:
            self._memory.store_conversation(
                body["id"], [*self._conversation, make_stored_message(answer)]
            )
        return body


def read_response_request(body: bytes, memory: Memory) -> ResponseRequest:
    """Read a request for a response. See `ReadRequest`."""
    return ResponseRequest(*read_fields(body, ResponseFields), memory)


def _reject_unsupported(fields: ResponseFields) -> None:
    require_range("max_output_tokens", fields.max_output_tokens, 1)
    require_range("top_logprobs", fields.top_logprobs, 0, MAX_ALTERNATIVES)
    # The key of an episode ends with it, so nobody could fetch an answer that was not awaited.
    if fields.background:
        raise reject_value("background", True, "false: the answer is awaited")
    if fields.conversation is not None:
        raise reject_value(
            "conversation",
            fields.conversation,
            "none; give previous_response_id, or all items as input",
        )
    if fields.prompt is not None:
        raise reject_value(
            "prompt",
            fields.prompt,
            "none: there are no stored prompts; give instructions and input",
        )
    # A prompt without its middle continues no earlier call, and would begin a new thread.
    if fields.truncation != "disabled":
        raise reject_value(
            "truncation", fields.truncation, "'disabled': nothing is left out of a conversation"
        )


def _recall_conversation(answer_id: str | None, memory: Memory) -> list[Message]:
    if answer_id is None:
        return []
    conversation = memory.recall(answer_id)
    if conversation is None:
        raise RequestError(
            f"previous_response_id is {answer_id!r}, expected a response of this session that was "
            "stored",
            code="previous_response_not_found",
            param="previous_response_id",
        )
    return list(conversation)


def _read_format(fields: ResponseFields) -> ReplyFormat | None:
    wanted = None if fields.text is None else fields.text.format
    found = None if wanted is None else read_text_format("text.format", wanted.type, wanted)
    if fields.structured_outputs is None:
        return found
    if found is not None:
        raise reject_value(
            "structured_outputs", fields.structured_outputs, "none beside text.format"
        )
    return fields.structured_outputs.format()
