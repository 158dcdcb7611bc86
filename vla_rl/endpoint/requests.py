"""What a client asks, in OpenAI's chat-completion format, as messages and tools; and what it may not ask.

What would change what an answer means, and is not supported, is refused. Everything else that is not read here, such as what
shapes sampling, is left to the training run, to which the log-probs that are trained on belong; the answer's header
`x-vla-rl-ignored` names it. A null is as good as nothing.
"""

from typing import Any, Final, Literal

import msgspec

from vla_rl.types import Message, ToolCall, ToolSpec

MOST_NAMED: Final = 32
"""Ignored fields that the header names."""


class RequestError(Exception):
    """A request that is refused.

    Args:
        message: what is wrong, what was expected.
        status: of HTTP.
        code: OpenAI's word for it, where there is one.
    """

    def __init__(self, message: str, *, status: int = 400, code: str | None = None) -> None:
        self.message, self.status, self.code = message, status, code
        super().__init__(message)


class _TextPart(msgspec.Struct, tag_field="type", tag="text"):
    text: str


class _Function(msgspec.Struct):
    name: str
    arguments: str | None = "{}"
    description: str | None = ""
    parameters: dict[str, Any] | None = None


class _Call(msgspec.Struct):
    id: str
    function: _Function


class _Message(msgspec.Struct):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[_TextPart] | None = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None
    name: str | None = None


class _Tool(msgspec.Struct):
    function: _Function
    type: Literal["function"] = "function"


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class ChatRequest(msgspec.Struct):
    """The fields of a request that count here."""

    messages: list[_Message]
    model: str | None = ""
    tools: list[_Tool] | None = None
    tool_choice: Any = "auto"
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stream: bool | None = False
    stream_options: _StreamOptions | None = None
    n: int | None = 1
    stop: Any = None
    response_format: Any = None

    @property
    def limit(self) -> int | None:
        """Tokens that the reply may have."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    def conversation(self) -> tuple[Message, ...]:
        """The messages, in our words."""
        return tuple(_message_of(message) for message in self.messages)

    def tool_specs(self) -> tuple[ToolSpec, ...]:
        """The tools, none where `tool_choice` is "none"."""
        if self.tool_choice == "none":
            return ()
        return tuple(
            ToolSpec(
                name=tool.function.name,
                description=tool.function.description or "",
                parameters=tool.function.parameters or {},
            )
            for tool in self.tools or ()
        )


def read_request(body: bytes) -> tuple[ChatRequest, tuple[str, ...]]:
    """The request, and the names of what it asks for in vain. Raises: RequestError."""
    try:
        raw = msgspec.json.decode(body, type=dict[str, Any])
        request = msgspec.convert(raw, ChatRequest)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise RequestError(f"the request is no chat completion: {error}") from error
    if not request.messages:
        raise RequestError("messages is empty, expected at least one.")
    if request.limit is not None and request.limit < 1:
        raise RequestError(f"max_tokens is {request.limit}, expected at least 1.")
    refused = {
        "n": request.n not in (None, 1),
        "stop": bool(request.stop),
        "response_format": request.response_format not in (None, {"type": "text"}),
        "tool_choice": request.tool_choice not in (None, "auto", "none"),
        "functions": bool(raw.get("functions")),
        "function_call": raw.get("function_call") not in (None, "auto", "none"),
        "modalities": raw.get("modalities") not in (None, ["text"]),
        "audio": raw.get("audio") is not None,
    }
    if wrong := [f"{name}={raw[name]!r}" for name, is_wrong in refused.items() if is_wrong]:
        raise RequestError(
            f"{', '.join(wrong)} is not supported here; expected one choice, no stop sequences, plain text, tools in "
            "place of functions, and tool_choice 'auto' or 'none'.",
            code="unsupported_parameter",
        )
    ignored = [name for name, value in raw.items() if value is not None and name not in ChatRequest.__struct_fields__]
    return request, tuple(ascii(name)[1:-1][:64] for name in ignored[:MOST_NAMED])  # as a header can have it


def _message_of(message: _Message) -> Message:
    content = message.content
    if isinstance(content, list):
        content = "".join(part.text for part in content)
    return Message(
        role="system" if message.role == "developer" else message.role,
        content=content or "",
        tool_calls=tuple(
            ToolCall(id=call.id, name=call.function.name, arguments=call.function.arguments or "{}")
            for call in message.tool_calls or ()
        ),
        tool_call_id=message.tool_call_id,
        name=message.name,
    )
