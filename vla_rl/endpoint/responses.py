"""What a client is answered, in OpenAI's chat-completion format: whole, or as a stream of chunks."""

import itertools
import time
from collections.abc import Iterator
from typing import Any

from vla_rl.types import Completion


def whole_answer(completion: Completion, answer_id: str, model: str) -> dict[str, Any]:
    """A `chat.completion`."""
    message: dict[str, Any] = {"role": "assistant", "content": completion.message.content or None}
    calls = _calls_of(completion, answer_id)
    if calls:
        message["tool_calls"] = calls
    else:
        message["content"] = completion.message.content
    choice = {"index": 0, "message": message, "finish_reason": _finish(completion), "logprobs": None}
    return {**_head(answer_id, model, "chat.completion"), "choices": [choice], "usage": _usage(completion)}


def streamed_answer(
    completion: Completion, answer_id: str, model: str, *, include_usage: bool
) -> Iterator[dict[str, Any]]:
    """The same as `chat.completion.chunk`s: role, content, tool calls, end, and the usage where it was asked for."""
    head = _head(answer_id, model, "chat.completion.chunk")

    def chunk(delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
        return {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": finish, "logprobs": None}]}

    yield chunk({"role": "assistant", "content": ""})
    if completion.message.content:
        yield chunk({"content": completion.message.content})
    for index, call in enumerate(_calls_of(completion, answer_id)):
        yield chunk({"tool_calls": [{"index": index, **call}]})
    yield chunk({}, _finish(completion))
    if include_usage:
        yield {**head, "choices": [], "usage": _usage(completion)}


def error_answer(message: str, status: int, code: str | None) -> dict[str, Any]:
    """An error as clients expect it."""
    kinds = {401: "authentication_error", 404: "not_found_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def _calls_of(completion: Completion, answer_id: str) -> list[dict[str, Any]]:
    """Ids are unique over all answers, since a policy's own are unique in one conversation only."""
    return [
        {
            "id": f"{answer_id.replace('chatcmpl', 'call')}-{number}",
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for number, call in zip(itertools.count(), completion.message.tool_calls, strict=False)
    ]


def _finish(completion: Completion) -> str:
    if completion.finish_reason == "length":
        return "length"
    return "tool_calls" if completion.message.tool_calls else "stop"


def _head(answer_id: str, model: str, kind: str) -> dict[str, Any]:
    return {"id": answer_id, "object": kind, "created": int(time.time()), "model": model}


def _usage(completion: Completion) -> dict[str, int]:
    num_read, num_said = len(completion.prompt_tokens), len(completion.tokens)
    return {"prompt_tokens": num_read, "completion_tokens": num_said, "total_tokens": num_read + num_said}
