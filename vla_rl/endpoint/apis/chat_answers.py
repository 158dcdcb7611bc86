"""Answers in the format of `/v1/chat/completions`: complete, or as a stream of chunks."""

from collections.abc import Iterator
from typing import Any

from vla_rl.endpoint.apis.api import Answer, data_event
from vla_rl.endpoint.apis.token_reports import chat_log_probs
from vla_rl.types import Completion


def whole_answer(answer: Answer, *, has_log_probs: bool) -> dict[str, Any]:
    """Return a `chat.completion`."""
    choices = [
        {
            "index": index,
            "message": _message(reply, _call_prefix(answer, index)),
            "finish_reason": _finish(reply),
            "logprobs": chat_log_probs(reply) if has_log_probs else None,
        }
        for index, reply in enumerate(answer.replies)
    ]
    return {**_head(answer, "chat.completion"), "choices": choices, "usage": _usage(answer)}


def streamed_answer(answer: Answer, *, has_log_probs: bool, wants_usage: bool) -> Iterator[bytes]:
    """Yield the same as `chat.completion.chunk`s.

    They are role, text, tool calls and end of each choice, then usage if requested.
    """
    head = _head(answer, "chat.completion.chunk")
    if wants_usage:
        head["usage"] = None

    def chunk(
        index: int, delta: dict[str, Any], finish: str | None = None, log_probs: Any = None
    ) -> bytes:
        choice = {"index": index, "delta": delta, "finish_reason": finish, "logprobs": log_probs}
        return data_event({**head, "choices": [choice]})

    for index, reply in enumerate(answer.replies):
        yield chunk(index, {"role": "assistant", "content": ""})
        log_probs = chat_log_probs(reply) if has_log_probs else None
        if reply.message.content or log_probs:
            yield chunk(index, {"content": reply.message.content}, log_probs=log_probs)
        for number, call in enumerate(_calls(reply, _call_prefix(answer, index))):
            yield chunk(index, {"tool_calls": [{"index": number, **call}]})
        yield chunk(index, {}, _finish(reply))
    if wants_usage:
        yield data_event({**head, "choices": [], "usage": _usage(answer)})
    yield b"data: [DONE]\n\n"


def _message(reply: Completion, prefix: str) -> dict[str, Any]:
    message: dict[str, Any] = {
        "role": "assistant",
        "content": reply.message.content,
        "refusal": None,
    }
    if calls := _calls(reply, prefix):
        message |= {"content": reply.message.content or None, "tool_calls": calls}
    return message


def _call_prefix(answer: Answer, index: int) -> str:
    """Return a prefix that makes ids unique over all answers.

    A policy's own are unique in one conversation only.
    """
    return f"call-{answer.number}-{index}"


def _calls(reply: Completion, prefix: str) -> list[dict[str, Any]]:
    return [
        {
            "id": f"{prefix}-{number}",
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for number, call in enumerate(reply.message.tool_calls)
    ]


def _finish(reply: Completion) -> str:
    if reply.finish_reason == "length":
        return "length"
    return "tool_calls" if reply.message.tool_calls else "stop"


def _head(answer: Answer, kind: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{answer.number}",
        "object": kind,
        "created": answer.created,
        "model": answer.model,
    }


def _usage(answer: Answer) -> dict[str, int]:
    """Return the usage; the prompt counts once for all its replies."""
    num_read, num_said = (
        len(answer.replies[0].prompt_tokens),
        sum(len(reply.tokens) for reply in answer.replies),
    )
    return {
        "prompt_tokens": num_read,
        "completion_tokens": num_said,
        "total_tokens": num_read + num_said,
    }
