"""OpenAI's older APIs: `/v1/chat/completions` for conversations, `/v1/completions` for text or tokens.

Fields that shape sampling, such as `temperature`, are ignored, because the training run sets them
for its log-probs; the answer's header `x-vla-rl-ignored` names them. An unsupported field that
would change the meaning of an answer is rejected.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Final, Literal

import msgspec
import numpy as np

from vla_rl.endpoint.answers import (
    get_reported_tokens,
    stream_chat_completion,
    write_chat_completion,
    write_head,
    write_usage,
)
from vla_rl.endpoint.api import (
    MAX_ALTERNATIVES,
    MAX_CHOICES,
    Answer,
    Asked,
    Function,
    JsonSchema,
    Memory,
    StructuredOutputs,
    make_data_event,
    read_fields,
    read_stop_texts,
    read_text_format,
    read_tool_rule,
    reject_value,
    require_range,
)
from vla_rl.types import Completion, Message, Prompt, ReplyFormat, ReplyOptions, ToolCall, ToolSpec

UNSUPPORTED: Final = {
    "functions": "tools instead",
    "function_call": "tool_choice instead",
    "audio": "none: there is text alone",
}


ROLES: Final = ("system", "developer", "user", "assistant", "tool")


class _Part(msgspec.Struct):
    type: str
    text: str = ""


class _CalledFunction(msgspec.Struct):
    name: str
    arguments: str | None = "{}"


class _Call(msgspec.Struct):
    id: str
    function: _CalledFunction


class _Message(msgspec.Struct):
    role: str
    content: str | list[_Part] | None = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None
    name: str | None = None

    def message(self, param: str) -> Message:
        """Return the message in the types of vla_rl. Raises: RequestError that begins with `param`."""
        if self.role not in ROLES:
            raise reject_value(f"{param}.role", self.role, f"one of {', '.join(ROLES)}")
        content = self.content
        if isinstance(content, list):
            for number, part in enumerate(content):
                if part.type != "text":
                    raise reject_value(f"{param}.content[{number}].type", part.type, "text")
            content = "".join(part.text for part in content)
        return Message(
            # `developer` is OpenAI's newer name of the same role.
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


class ChatFields(msgspec.Struct):
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

    def __init__(self, fields: ChatFields, ignored: tuple[str, ...]) -> None:
        _reject_unsupported(fields)
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
            prompts=(
                tuple(
                    message.message(f"messages[{number}]")
                    for number, message in enumerate(fields.messages)
                ),
            ),
            model=fields.model,
            tools=() if fields.tool_choice == "none" else tools,
            options=_read_options(fields, tools),
            max_tokens=limit,
            num_choices=fields.n,
            stream=fields.stream,
            ignored=ignored,
        )

    def write_body(self, answer: Answer) -> dict[str, Any]:
        """Return a `chat.completion`."""
        return write_chat_completion(answer, has_log_probs=self._has_log_probs)

    def stream_events(self, answer: Answer) -> Iterator[bytes]:
        """Yield the same as `chat.completion.chunk`s."""
        return stream_chat_completion(
            answer, has_log_probs=self._has_log_probs, wants_usage=self._wants_usage
        )


def read_chat_request(body: bytes, memory: Memory) -> ChatRequest:
    """Read a request for chat completions. See `ReadRequest`."""
    return ChatRequest(*read_fields(body, ChatFields))


def _reject_unsupported(fields: ChatFields) -> None:
    if not fields.messages:
        raise reject_value("messages", [], "at least one message")
    # Refused and not ignored: an agent that asks for functions in the old form would wait for calls
    # in that form.
    for name, expected in UNSUPPORTED.items():
        if (value := getattr(fields, name)) and value not in ("auto", "none"):
            raise reject_value(name, value, expected)
    if fields.modalities not in (None, ["text"]):
        raise reject_value("modalities", fields.modalities, "['text']")
    require_range("n", fields.n, 1, MAX_CHOICES)
    require_range("max_tokens", fields.max_tokens, 1)
    require_range("max_completion_tokens", fields.max_completion_tokens, 1)
    require_range("top_logprobs", fields.top_logprobs, 0, MAX_ALTERNATIVES)
    if fields.top_logprobs and not fields.logprobs:
        raise reject_value("top_logprobs", fields.top_logprobs, "none unless logprobs is true")


def _read_options(fields: ChatFields, tools: tuple[ToolSpec, ...]) -> ReplyOptions:
    return ReplyOptions(
        format=_read_format(fields),
        stop=read_stop_texts(fields.stop),
        tools=read_tool_rule("tool_choice", fields.tool_choice, fields.parallel_tool_calls, tools),
        top_log_probs=(fields.top_logprobs or 0) if fields.logprobs else None,
    )


def _read_format(fields: ChatFields) -> ReplyFormat | None:
    wanted = fields.response_format
    found = (
        None
        if wanted is None
        else read_text_format("response_format", wanted.type, wanted.json_schema)
    )
    if fields.structured_outputs is None:
        return found
    if found is not None:
        raise reject_value(
            "structured_outputs", fields.structured_outputs, "none beside response_format"
        )
    return fields.structured_outputs.format()


MAX_LISTED: Final = 5
"""Most alternatives to a token that OpenAI lists in this API."""


class CompletionFields(msgspec.Struct):
    prompt: str | list[str | int | list[int]]
    model: str = ""
    max_tokens: int | None = 16
    n: int = 1
    stop: str | list[str] | None = None
    stream: bool = False
    stream_options: _StreamOptions | None = None
    logprobs: int | None = None
    structured_outputs: StructuredOutputs | None = None
    best_of: int = 1
    echo: bool = False
    suffix: str | None = None


class CompletionRequest:
    """A request for text completions."""

    def __init__(self, fields: CompletionFields, ignored: tuple[str, ...]) -> None:
        require_range("n", fields.n, 1, MAX_CHOICES)
        require_range("max_tokens", fields.max_tokens, 1)
        require_range("logprobs", fields.logprobs, 0, MAX_LISTED)
        # Replies that were sampled and not returned would be missing in training, and the rest a
        # sample that was chosen by its log-probs.
        if fields.best_of > fields.n:
            raise reject_value(
                "best_of",
                fields.best_of,
                f"at most n={fields.n}: every reply that is sampled is returned",
            )
        if fields.echo:
            raise reject_value("echo", True, "false: log-probs of prompts are not computed")
        if fields.suffix:
            raise reject_value("suffix", fields.suffix, "none: text is continued at its end")
        self._has_log_probs = fields.logprobs is not None
        self._wants_usage = fields.stream_options is not None and bool(
            fields.stream_options.include_usage
        )
        structured = fields.structured_outputs
        self.asked = Asked(
            prompts=_read_prompts(fields.prompt),
            model=fields.model,
            options=ReplyOptions(
                format=None if structured is None else structured.format(),
                stop=read_stop_texts(fields.stop),
                top_log_probs=fields.logprobs,
            ),
            max_tokens=fields.max_tokens,
            num_choices=fields.n,
            stream=fields.stream,
            ignored=ignored,
        )

    def write_body(self, answer: Answer) -> dict[str, Any]:
        """Return a `text_completion`."""
        choices = [self._choice(index, reply) for index, reply in enumerate(answer.replies)]
        usage = write_usage(answer, self.asked.num_choices)
        return {**write_head(answer, "cmpl", "text_completion"), "choices": choices, "usage": usage}

    def stream_events(self, answer: Answer) -> Iterator[bytes]:
        """Yield the same, one event for each choice."""
        head = write_head(answer, "cmpl", "text_completion")
        for index, reply in enumerate(answer.replies):
            yield make_data_event({**head, "choices": [self._choice(index, reply)]})
        if self._wants_usage:
            usage = write_usage(answer, self.asked.num_choices)
            yield make_data_event({**head, "choices": [], "usage": usage})
        yield b"data: [DONE]\n\n"

    def _choice(self, index: int, reply: Completion) -> dict[str, Any]:
        return {
            "index": index,
            "text": reply.message.content,
            "finish_reason": reply.finish_reason,
            "logprobs": _write_log_probs(reply) if self._has_log_probs else None,
        }


def read_completion_request(body: bytes, memory: Memory) -> CompletionRequest:
    """Read a request for text completions. See `ReadRequest`."""
    return CompletionRequest(*read_fields(body, CompletionFields))


def _read_prompts(given: str | list[str | int | list[int]]) -> tuple[Prompt, ...]:
    """Read one text, one list of tokens, or a list of several of either."""
    if isinstance(given, str):
        return (given,)
    if not given:
        raise reject_value("prompt", given, "a text, tokens, or a list of them that is not empty")
    # A list of numbers is one prompt of tokens, and not as many prompts.
    if all(isinstance(each, int) for each in given):
        return (_read_tokens(given),)
    if any(isinstance(each, int) for each in given):
        raise reject_value(
            "prompt", given, "texts or lists of tokens, not single tokens between them"
        )
    return tuple(each if isinstance(each, str) else _read_tokens(each) for each in given)  # type: ignore[arg-type]


def _read_tokens(given: Sequence[Any]) -> np.ndarray:
    # Only so that an array can hold them: the policy itself refuses tokens that its vocabulary
    # lacks.
    if not all(0 <= token < 1 << 31 for token in given):
        raise reject_value("prompt", given, "token ids of the policy's vocabulary")
    return np.array(given, np.int64)


def _write_log_probs(reply: Completion) -> dict[str, Any]:
    pairs = get_reported_tokens(reply)
    texts = [token.text.decode(errors="replace") for token, _ in pairs]
    return {
        "tokens": texts,
        "token_logprobs": [log_prob for _, log_prob in pairs],
        "top_logprobs": [
            {text.decode(errors="replace"): log_prob for text, log_prob in token.alternatives}
            for token, _ in pairs
        ],
        "text_offset": list(itertools.accumulate(map(len, texts[:-1]), initial=0)) if texts else [],
    }
