"""`/v1/responses`: conversations in the format of OpenAI's newer API.

It is a list of items instead of messages.

An answer can be continued with `previous_response_id` until its session ends, unless `store` is
false. As with OpenAI, the instructions of earlier requests are not carried over.
"""

from collections.abc import Iterator
from typing import Any, Final, Literal

import msgspec

from vla_rl.endpoint.apis.api import Answer, Asked, Memory
from vla_rl.endpoint.apis.fields import read_fields, refuse
from vla_rl.endpoint.apis.response_answers import Echo, response_body, response_events, said_message
from vla_rl.endpoint.apis.response_items import Item, messages_of
from vla_rl.endpoint.apis.rules import (
    MOST_ALTERNATIVES,
    Function,
    JsonSchema,
    StructuredOutputs,
    require_range,
    text_format,
    tool_rule,
)
from vla_rl.endpoint.errors import RequestError, openai_error
from vla_rl.types import Message, ReplyFormat, ReplyOptions

LOG_PROBS: Final = "message.output_text.logprobs"
"""Entry of `include` that requests the log-probs of the text."""


class _Tool(Function):
    type: Literal["function"] = "function"


class _Format(JsonSchema):
    type: str = "text"


class _Text(msgspec.Struct):
    format: _Format | None = None


class _Fields(msgspec.Struct):
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

    def __init__(self, fields: _Fields, ignored: tuple[str, ...], memory: Memory) -> None:
        _refuse_unsupported(fields)
        tools = tuple(tool.spec() for tool in fields.tools)
        self._memory, self._stores = memory, fields.store
        self._heard = [*_earlier(fields.previous_response_id, memory), *messages_of(fields.input)]
        if not self._heard:
            raise RequestError(
                "input is empty, expected a text or at least one item", param="input"
            )
        self._has_log_probs = LOG_PROBS in fields.include or fields.top_logprobs is not None
        self._echo = Echo(
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
            prompts=((*system, *self._heard),),
            model=fields.model,
            tools=() if fields.tool_choice == "none" else tools,
            options=ReplyOptions(
                format=_format(fields),
                tools=tool_rule(
                    "tool_choice", fields.tool_choice, fields.parallel_tool_calls, tools
                ),
                top_log_probs=(fields.top_logprobs or 0) if self._has_log_probs else None,
            ),
            max_tokens=fields.max_output_tokens,
            stream=fields.stream,
            ignored=ignored,
        )

    def whole(self, answer: Answer) -> dict[str, Any]:
        """Return a `response`."""
        return self._completed(answer)

    def events(self, answer: Answer) -> Iterator[bytes]:
        """Yield the same, as the events that build up a response."""
        return response_events(self._completed(answer))

    def _completed(self, answer: Answer) -> dict[str, Any]:
        body = response_body(answer, self._echo, has_log_probs=self._has_log_probs)
        if self._stores:
            self._memory.remember(body["id"], [*self._heard, said_message(answer)])
        return body


class ResponseApi:
    """Responses."""

    path = "/v1/responses"

    def read(self, body: bytes, memory: Memory) -> ResponseRequest:
        """Read a request. Raises: RequestError."""
        return ResponseRequest(*read_fields(body, _Fields), memory)

    def error(self, error: RequestError) -> dict[str, Any]:
        """Return an error in OpenAI's format."""
        return openai_error(error)


def _refuse_unsupported(fields: _Fields) -> None:
    require_range("max_output_tokens", fields.max_output_tokens, 1)
    require_range("top_logprobs", fields.top_logprobs, 0, MOST_ALTERNATIVES)
    if fields.background:
        raise refuse("background", True, "false: the answer is awaited")
    if fields.conversation is not None:
        raise refuse(
            "conversation",
            fields.conversation,
            "none; give previous_response_id, or all items as input",
        )
    if fields.prompt is not None:
        raise refuse(
            "prompt",
            fields.prompt,
            "none: there are no stored prompts; give instructions and input",
        )
    if fields.truncation != "disabled":
        raise refuse(
            "truncation", fields.truncation, "'disabled': nothing is left out of a conversation"
        )


def _earlier(answer_id: str | None, memory: Memory) -> list[Message]:
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


def _format(fields: _Fields) -> ReplyFormat | None:
    wanted = None if fields.text is None else fields.text.format
    found = None if wanted is None else text_format("text.format", wanted.type, wanted)
    if fields.structured_outputs is None:
        return found
    if found is not None:
        raise refuse("structured_outputs", fields.structured_outputs, "none beside text.format")
    return fields.structured_outputs.format()
