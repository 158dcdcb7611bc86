"""`/v1/messages`: conversations in the format of Anthropic's API.

For agents that support no other.
"""

import json
from collections.abc import Iterator
from typing import Any, Literal

import msgspec

from vla_rl.endpoint.apis.api import Answer, Asked, Memory, encoded, named_event
from vla_rl.endpoint.apis.fields import read_fields, refuse
from vla_rl.endpoint.apis.rules import JsonSchema, require_range, stop_texts, text_format
from vla_rl.endpoint.errors import RequestError, anthropic_error
from vla_rl.types import Message, ReplyFormat, ReplyOptions, ToolCall, ToolRule, ToolSpec
from vla_rl.util.values import excerpt


class _Block(msgspec.Struct):
    type: str
    text: str = ""
    id: str = ""
    name: str = ""
    input: dict[str, Any] = {}
    tool_use_id: str = ""
    content: "str | list[_Block]" = ""


class _Message(msgspec.Struct):
    role: Literal["user", "assistant"]
    content: str | list[_Block]


class _Tool(msgspec.Struct):
    name: str
    input_schema: dict[str, Any]
    description: str = ""
    strict: bool = False


class _ToolChoice(msgspec.Struct):
    type: Literal["auto", "any", "tool", "none"] = "auto"
    name: str | None = None
    disable_parallel_tool_use: bool = False


class _OutputFormat(JsonSchema):
    type: str = "json_schema"
    strict: bool | None = True


class _OutputConfig(msgspec.Struct):
    format: _OutputFormat | None = None


class _Fields(msgspec.Struct):
    """The fields of a request that are read."""

    messages: list[_Message]
    max_tokens: int
    model: str = ""
    system: str | list[_Block] = ""
    tools: list[_Tool] = []
    tool_choice: _ToolChoice | None = None
    stop_sequences: list[str] = []
    stream: bool = False
    output_config: _OutputConfig | None = None


class MessagesRequest:
    """A request for a message."""

    def __init__(self, fields: _Fields, ignored: tuple[str, ...]) -> None:
        require_range("max_tokens", fields.max_tokens, 1)
        if not fields.messages:
            raise refuse("messages", [], "at least one message")
        system = _text("system", fields.system)
        messages = [Message(role="system", content=system)] if system else []
        for number, message in enumerate(fields.messages):
            messages += _messages(f"messages[{number}]", message)
        rule = _tool_rule(fields)
        self.asked = Asked(
            prompts=(tuple(messages),),
            model=fields.model,
            tools=() if rule.mode == "none" else tuple(_spec(tool) for tool in fields.tools),
            options=ReplyOptions(
                format=_format(fields), stop=stop_texts(fields.stop_sequences), tools=rule
            ),
            max_tokens=fields.max_tokens,
            stream=fields.stream,
            ignored=ignored,
        )

    def whole(self, answer: Answer) -> dict[str, Any]:
        """Return a `message`."""
        (reply,) = answer.replies
        blocks: list[dict[str, Any]] = []
        if reply.message.content:
            blocks.append({"type": "text", "text": reply.message.content})
        for number, call in enumerate(reply.message.tool_calls):
            call_id = f"toolu_{answer.number}_{number}"
            blocks.append(
                {
                    "type": "tool_use",
                    "id": call_id,
                    "name": call.name,
                    "input": _object(call.arguments),
                }
            )
        reason = "end_turn"
        if reply.finish_reason == "length":
            reason = "max_tokens"
        elif reply.stopped_by is not None:
            reason = "stop_sequence"
        elif reply.message.tool_calls:
            reason = "tool_use"
        return {
            "id": f"msg_{answer.number}",
            "type": "message",
            "role": "assistant",
            "model": answer.model,
            "content": blocks,
            "stop_reason": reason,
            "stop_sequence": reply.stopped_by,
            "usage": {"input_tokens": len(reply.prompt_tokens), "output_tokens": len(reply.tokens)},
        }

    def events(self, answer: Answer) -> Iterator[bytes]:
        """Yield the same, block by block."""
        body = self.whole(answer)
        begun = {**body, "content": [], "stop_reason": None, "stop_sequence": None}
        yield named_event({"type": "message_start", "message": begun})
        for index, block in enumerate(body["content"]):
            if block["type"] == "text":
                empty, delta = {**block, "text": ""}, {"type": "text_delta", "text": block["text"]}
            else:
                empty = {**block, "input": {}}
                written = encoded(block["input"]).decode()
                delta = {"type": "input_json_delta", "partial_json": written}
            yield named_event(
                {"type": "content_block_start", "index": index, "content_block": empty}
            )
            yield named_event({"type": "content_block_delta", "index": index, "delta": delta})
            yield named_event({"type": "content_block_stop", "index": index})
        ended = {"stop_reason": body["stop_reason"], "stop_sequence": body["stop_sequence"]}
        yield named_event({"type": "message_delta", "delta": ended, "usage": body["usage"]})
        yield named_event({"type": "message_stop"})


class MessagesApi:
    """Anthropic's messages."""

    path = "/v1/messages"

    def read(self, body: bytes, memory: Memory) -> MessagesRequest:
        """Read a request. Raises: RequestError."""
        return MessagesRequest(*read_fields(body, _Fields))

    def error(self, error: RequestError) -> dict[str, Any]:
        """Return an error in Anthropic's format."""
        return anthropic_error(error)


def _messages(name: str, message: _Message) -> list[Message]:
    """Convert a message of the API into ours, with a separate one for each tool result."""
    if isinstance(message.content, str):
        return [Message(role=message.role, content=message.content)]
    results: list[Message] = []
    texts: list[str] = []
    calls: list[ToolCall] = []
    for number, block in enumerate(message.content):
        place = f"{name}.content[{number}]"
        if block.type == "text":
            texts.append(block.text)
        elif block.type == "tool_use":
            calls.append(ToolCall(id=block.id, name=block.name, arguments=json.dumps(block.input)))
        elif block.type == "tool_result":
            content = _text(f"{place}.content", block.content)
            results.append(Message(role="tool", content=content, tool_call_id=block.tool_use_id))
        elif block.type not in ("thinking", "redacted_thinking"):  # of another model: ignored
            raise refuse(f"{place}.type", block.type, "text, tool_use or tool_result")
    if texts or calls or not results:
        results.append(Message(role=message.role, content="".join(texts), tool_calls=tuple(calls)))
    return results


def _text(name: str, content: str | list[_Block]) -> str:
    if isinstance(content, str):
        return content
    for number, block in enumerate(content):
        if block.type != "text":
            raise refuse(f"{name}[{number}].type", block.type, "text: the policy sees nothing else")
    return "".join(block.text for block in content)


def _spec(tool: _Tool) -> ToolSpec:
    return ToolSpec(
        name=tool.name,
        description=tool.description,
        parameters=tool.input_schema,
        is_strict=tool.strict,
    )


def _tool_rule(fields: _Fields) -> ToolRule:
    choice, names = fields.tool_choice or _ToolChoice(), [tool.name for tool in fields.tools]
    max_calls = 1 if choice.disable_parallel_tool_use and names else None
    if choice.type == "any" and not names:
        raise refuse(
            "tool_choice.type", "any", "'auto' or 'none' without tools; give at least one tool"
        )
    if choice.type == "tool":
        if choice.name not in names:
            raise refuse(
                "tool_choice.name",
                choice.name,
                f"the name of a tool of this request, which are {excerpt(names)}",
            )
        return ToolRule(mode="required", names=(choice.name,), max_calls=1)
    modes: dict[str, Literal["auto", "none", "required"]] = {
        "auto": "auto",
        "none": "none",
        "any": "required",
    }
    return ToolRule(mode=modes[choice.type], max_calls=max_calls)


def _format(fields: _Fields) -> ReplyFormat | None:
    wanted = None if fields.output_config is None else fields.output_config.format
    return None if wanted is None else text_format("output_config.format", wanted.type, wanted)


def _object(arguments: str) -> dict[str, Any]:
    """Return arguments as the object that this API requires.

    Anything else that the policy wrote is put under `value`.
    """
    try:
        value = msgspec.json.decode(arguments)
        msgspec.json.encode(value)
    except (ValueError, OverflowError, RecursionError):
        value = arguments
    return value if isinstance(value, dict) else {"value": value}
