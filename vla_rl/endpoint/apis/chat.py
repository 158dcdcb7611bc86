"""`/v1/chat/completions`: conversations in the format of OpenAI's older API.

Fields that shape sampling, such as `temperature`, are ignored, because the training run sets them
for its log-probs; the answer's header `x-vla-rl-ignored` names them. An unsupported field that
would change the meaning of an answer is rejected.
"""

from collections.abc import Iterator
from typing import Any, Final, Literal

import msgspec

from vla_rl.endpoint.apis.api import Answer, Asked, Memory
from vla_rl.endpoint.apis.chat_answers import streamed_answer, whole_answer
from vla_rl.endpoint.apis.fields import read_fields, refuse
from vla_rl.endpoint.apis.rules import (
    MOST_ALTERNATIVES,
    MOST_CHOICES,
    Function,
    JsonSchema,
    StructuredOutputs,
    require_range,
    stop_texts,
    text_format,
    tool_rule,
)
from vla_rl.endpoint.errors import RequestError, openai_error
from vla_rl.types import Message, ReplyFormat, ReplyOptions, ToolCall, ToolSpec

REFUSED: Final = {
    "functions": "tools instead",
    "function_call": "tool_choice instead",
    "audio": "none: there is text alone",
}


class _TextPart(msgspec.Struct, tag_field="type", tag="text"):
    text: str


class _CalledFunction(msgspec.Struct):
    name: str
    arguments: str | None = "{}"


class _Call(msgspec.Struct):
    id: str
    function: _CalledFunction


class _Message(msgspec.Struct):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[_TextPart] | None = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None
    name: str | None = None

    def message(self) -> Message:
        """Return the message in the types of vla_rl."""
        content = self.content
        if isinstance(content, list):
            content = "".join(part.text for part in content)
        return Message(
            role="system" if self.role == "developer" else self.role,
            content=content or "",
            tool_calls=tuple(
                ToolCall(
                    id=call.id, name=call.function.name, arguments=call.function.arguments or "{}"
                )
                for call in self.tool_calls or ()
            ),
            tool_call_id=self.tool_call_id,
            name=self.name,
        )


class _Tool(msgspec.Struct):
    function: Function
    type: Literal["function"] = "function"


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _ResponseFormat(msgspec.Struct):
    type: str
    json_schema: JsonSchema | None = None


class _Fields(msgspec.Struct):
    """The fields of a request that are read."""

    messages: list[_Message]
    model: str = ""
    tools: list[_Tool] = []
    tool_choice: Any = "auto"
    parallel_tool_calls: bool | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stream: bool = False
    stream_options: _StreamOptions | None = None
    n: int = 1
    stop: str | list[str] | None = None
    response_format: _ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    functions: Any = None
    function_call: Any = None
    audio: Any = None
    modalities: list[str] | None = None


class ChatRequest:
    """A request for chat completions."""

    def __init__(self, fields: _Fields, ignored: tuple[str, ...]) -> None:
        _refuse_unsupported(fields)
        tools = tuple(tool.function.spec() for tool in fields.tools)
        limit = (
            fields.max_completion_tokens
            if fields.max_completion_tokens is not None
            else fields.max_tokens
        )
        self._has_log_probs = fields.logprobs
        self._wants_usage = fields.stream_options is not None and bool(
            fields.stream_options.include_usage
        )
        self.asked = Asked(
            prompts=(tuple(message.message() for message in fields.messages),),
            model=fields.model,
            tools=() if fields.tool_choice == "none" else tools,
            options=_options(fields, tools),
            max_tokens=limit,
            num_choices=fields.n,
            stream=fields.stream,
            ignored=ignored,
        )

    def whole(self, answer: Answer) -> dict[str, Any]:
        """Return a `chat.completion`."""
        return whole_answer(answer, has_log_probs=self._has_log_probs)

    def events(self, answer: Answer) -> Iterator[bytes]:
        """Yield the same as `chat.completion.chunk`s."""
        return streamed_answer(
            answer, has_log_probs=self._has_log_probs, wants_usage=self._wants_usage
        )


class ChatApi:
    """Chat completions."""

    path = "/v1/chat/completions"

    def read(self, body: bytes, memory: Memory) -> ChatRequest:
        """Read a request. Raises: RequestError."""
        return ChatRequest(*read_fields(body, _Fields))

    def error(self, error: RequestError) -> dict[str, Any]:
        """Return an error in OpenAI's format."""
        return openai_error(error)


def _refuse_unsupported(fields: _Fields) -> None:
    if not fields.messages:
        raise refuse("messages", [], "at least one message")
    for name, expected in REFUSED.items():
        if (value := getattr(fields, name)) and value not in ("auto", "none"):
            raise refuse(name, value, expected)
    if fields.modalities not in (None, ["text"]):
        raise refuse("modalities", fields.modalities, "['text']")
    require_range("n", fields.n, 1, MOST_CHOICES)
    require_range("max_tokens", fields.max_tokens, 1)
    require_range("max_completion_tokens", fields.max_completion_tokens, 1)
    require_range("top_logprobs", fields.top_logprobs, 0, MOST_ALTERNATIVES)
    if fields.top_logprobs and not fields.logprobs:
        raise refuse("top_logprobs", fields.top_logprobs, "none unless logprobs is true")


def _options(fields: _Fields, tools: tuple[ToolSpec, ...]) -> ReplyOptions:
    return ReplyOptions(
        format=_format(fields),
        stop=stop_texts(fields.stop),
        tools=tool_rule("tool_choice", fields.tool_choice, fields.parallel_tool_calls, tools),
        top_log_probs=(fields.top_logprobs or 0) if fields.logprobs else None,
    )


def _format(fields: _Fields) -> ReplyFormat | None:
    wanted = fields.response_format
    found = (
        None if wanted is None else text_format("response_format", wanted.type, wanted.json_schema)
    )
    if fields.structured_outputs is None:
        return found
    if found is not None:
        raise refuse("structured_outputs", fields.structured_outputs, "none beside response_format")
    return fields.structured_outputs.format()
