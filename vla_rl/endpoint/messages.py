"""`/v1/messages`: conversations in the format of Anthropic's API, for agents that support no other."""

import json
from collections.abc import Iterator
from typing import Any, Literal

import msgspec

from vla_rl.endpoint.api import (
    Answer,
    Asked,
    JsonSchema,
    Memory,
    encode_body,
    make_named_event,
    read_fields,
    read_stop_texts,
    read_text_format,
    reject_value,
    require_range,
)
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


class MessagesFields(msgspec.Struct):
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

    def __init__(self, fields: MessagesFields, ignored: tuple[str, ...]) -> None:
        require_range("max_tokens", fields.max_tokens, 1)
        if not fields.messages:
            raise reject_value("messages", [], "at least one message")
        # This API has the system prompt beside the messages; chat templates take it as the first of
        # them.
        system = _read_text("system", fields.system)
        messages = [Message(role="system", content=system)] if system else []
        for number, message in enumerate(fields.messages):
            messages += _read_message(f"messages[{number}]", message)
        rule = _read_tool_rule(fields)
        self.asked = Asked(
            prompts=(tuple(messages),),
            model=fields.model,
            # Not in the prompt either: calls of tools that a reply must not call would stay in its
            # text.
            tools=() if rule.mode == "none" else tuple(_read_tool(tool) for tool in fields.tools),
            options=ReplyOptions(
                format=_read_format(fields), stop=read_stop_texts(fields.stop_sequences), tools=rule
            ),
            max_tokens=fields.max_tokens,
            stream=fields.stream,
            ignored=ignored,
        )

    def write_body(self, answer: Answer) -> dict[str, Any]:
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
                    "input": _read_arguments(call.arguments),
                }
            )
        # The limit counts before calls: an agent that reads `tool_use` would run a call of a reply
        # that was cut off.
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

    def stream_events(self, answer: Answer) -> Iterator[bytes]:
        """Yield the same, block by block."""
        body = self.write_body(answer)
        opening = {**body, "content": [], "stop_reason": None, "stop_sequence": None}
        yield make_named_event({"type": "message_start", "message": opening})
        for index, block in enumerate(body["content"]):
            if block["type"] == "text":
                empty, delta = {**block, "text": ""}, {"type": "text_delta", "text": block["text"]}
            else:
                empty = {**block, "input": {}}
                written = encode_body(block["input"]).decode()
                delta = {"type": "input_json_delta", "partial_json": written}
            yield make_named_event(
                {"type": "content_block_start", "index": index, "content_block": empty}
            )
            yield make_named_event({"type": "content_block_delta", "index": index, "delta": delta})
            yield make_named_event({"type": "content_block_stop", "index": index})
        ended = {"stop_reason": body["stop_reason"], "stop_sequence": body["stop_sequence"]}
        yield make_named_event({"type": "message_delta", "delta": ended, "usage": body["usage"]})
        yield make_named_event({"type": "message_stop"})


def read_anthropic_request(body: bytes, memory: Memory) -> MessagesRequest:
    """Read a request for a message. See `ReadRequest`."""
    return MessagesRequest(*read_fields(body, MessagesFields))


def _read_message(name: str, message: _Message) -> list[Message]:
    """Convert a message of the API into ours, with a separate one for each tool result."""
    if isinstance(message.content, str):
        return [Message(role=message.role, content=message.content)]
    results: list[Message] = []
    texts: list[str] = []
    calls: list[ToolCall] = []
    for number, block in enumerate(message.content):
        location = f"{name}.content[{number}]"
        if block.type == "text":
            texts.append(block.text)
        elif block.type == "tool_use":
            calls.append(ToolCall(id=block.id, name=block.name, arguments=json.dumps(block.input)))
        elif block.type == "tool_result":
            content = _read_text(f"{location}.content", block.content)
            results.append(Message(role="tool", content=content, tool_call_id=block.tool_use_id))
        elif block.type not in ("thinking", "redacted_thinking"):  # of another model: ignored
            raise reject_value(f"{location}.type", block.type, "text, tool_use or tool_result")
    if texts or calls or not results:
        results.append(Message(role=message.role, content="".join(texts), tool_calls=tuple(calls)))
    return results


def _read_text(name: str, content: str | list[_Block]) -> str:
    if isinstance(content, str):
        return content
    for number, block in enumerate(content):
        if block.type != "text":
            raise reject_value(
                f"{name}[{number}].type", block.type, "text: the policy sees nothing else"
            )
    return "".join(block.text for block in content)


def _read_tool(tool: _Tool) -> ToolSpec:
    return ToolSpec(
        name=tool.name,
        description=tool.description,
        parameters=tool.input_schema,
        is_strict=tool.strict,
    )


def _read_tool_rule(fields: MessagesFields) -> ToolRule:
    choice, names = fields.tool_choice or _ToolChoice(), [tool.name for tool in fields.tools]
    max_calls = 1 if choice.disable_parallel_tool_use and names else None
    if choice.type == "any" and not names:
        raise reject_value(
            "tool_choice.type", "any", "'auto' or 'none' without tools; give at least one tool"
        )
    if choice.type == "tool":
        if choice.name not in names:
            raise reject_value(
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


def _read_format(fields: MessagesFields) -> ReplyFormat | None:
    wanted = None if fields.output_config is None else fields.output_config.format
    return None if wanted is None else read_text_format("output_config.format", wanted.type, wanted)


def _read_arguments(arguments: str) -> dict[str, Any]:
    """Return arguments as the object that this API requires.

    Anything else that the policy wrote is put under `value`.
    """
    try:
        value = msgspec.json.decode(arguments)
        msgspec.json.encode(value)
    except (ValueError, OverflowError, RecursionError):
        value = arguments
    return value if isinstance(value, dict) else {"value": value}
