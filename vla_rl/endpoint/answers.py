"""Answers in OpenAI's formats: complete, or as the events that build them up.

Log-probs are the recorded ones, without the token that ends a reply: those of the distribution that was
sampled, after the run's temperature and under the reply's grammar.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import msgspec

from vla_rl.endpoint.api import Answer, make_data_event, make_named_event
from vla_rl.types import Completion, Message, TokenReport


def write_chat_log_probs(reply: Completion) -> dict[str, Any]:
    """Return the `logprobs` of a chat completion's choice."""
    return {"content": write_log_probs(reply), "refusal": None}


def write_log_probs(reply: Completion) -> list[dict[str, Any]]:
    """Return one entry for each token of the reply's text, with its calls."""
    return [
        {
            **_write_token(token.text, log_prob),
            "top_logprobs": [_write_token(text, other) for text, other in token.alternatives],
        }
        for token, log_prob in get_reported_tokens(reply)
    ]


def get_reported_tokens(reply: Completion) -> list[tuple[TokenReport, float]]:
    """Return the tokens of the text, with their log-probs; none if the policy reports none."""
    if reply.report is None:
        return []
    pairs = list(zip(reply.report, reply.log_probs.tolist(), strict=True))
    has_end_token = reply.finish_reason == "stop" and reply.stopped_by is None
    return pairs[:-1] if has_end_token else pairs


def _write_token(text: bytes, log_prob: float) -> dict[str, Any]:
    # A token may end in the middle of a letter, which only `bytes` tells exactly.
    return {"token": text.decode(errors="replace"), "logprob": log_prob, "bytes": list(text)}


def write_chat_completion(answer: Answer, *, has_log_probs: bool) -> dict[str, Any]:
    """Return a `chat.completion`."""
    choices = [
        {
            "index": index,
            "message": _write_chat_message(reply, _make_call_prefix(answer, index)),
            "finish_reason": _write_finish_reason(reply),
            "logprobs": write_chat_log_probs(reply) if has_log_probs else None,
        }
        for index, reply in enumerate(answer.replies)
    ]
    return {
        **write_head(answer, "chatcmpl", "chat.completion"),
        "choices": choices,
        "usage": write_usage(answer, len(answer.replies)),
    }


def stream_chat_completion(
    answer: Answer, *, has_log_probs: bool, wants_usage: bool
) -> Iterator[bytes]:
    """Yield the same as `chat.completion.chunk`s.

    They are role, text, tool calls and end of each choice, then usage if requested.
    """
    head = write_head(answer, "chatcmpl", "chat.completion.chunk")
    if wants_usage:
        head["usage"] = None

    def chunk(
        index: int, delta: dict[str, Any], finish: str | None = None, log_probs: Any = None
    ) -> bytes:
        choice = {"index": index, "delta": delta, "finish_reason": finish, "logprobs": log_probs}
        return make_data_event({**head, "choices": [choice]})

    for index, reply in enumerate(answer.replies):
        yield chunk(index, {"role": "assistant", "content": ""})
        log_probs = write_chat_log_probs(reply) if has_log_probs else None
        if reply.message.content or log_probs:
            yield chunk(index, {"content": reply.message.content}, log_probs=log_probs)
        for number, call in enumerate(_write_calls(reply, _make_call_prefix(answer, index))):
            yield chunk(index, {"tool_calls": [{"index": number, **call}]})
        yield chunk(index, {}, _write_finish_reason(reply))
    if wants_usage:
        yield make_data_event(
            {**head, "choices": [], "usage": write_usage(answer, len(answer.replies))}
        )
    yield b"data: [DONE]\n\n"


def _write_chat_message(reply: Completion, prefix: str) -> dict[str, Any]:
    message: dict[str, Any] = {
        "role": "assistant",
        "content": reply.message.content,
        "refusal": None,
    }
    if calls := _write_calls(reply, prefix):
        # OpenAI answers null and not an empty text beside calls.
        message |= {"content": reply.message.content or None, "tool_calls": calls}
    return message


def _make_call_prefix(answer: Answer, index: int) -> str:
    """Return a prefix that makes ids unique over all answers.

    A policy's own are unique in one conversation only.
    """
    return f"call-{answer.number}-{index}"


def _write_calls(reply: Completion, prefix: str) -> list[dict[str, Any]]:
    return [
        {
            "id": f"{prefix}-{number}",
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for number, call in enumerate(reply.message.tool_calls)
    ]


def _write_finish_reason(reply: Completion) -> str:
    if reply.finish_reason == "length":
        return "length"
    return "tool_calls" if reply.message.tool_calls else "stop"


def write_head(answer: Answer, prefix: str, kind: str) -> dict[str, Any]:
    """Return the fields that every answer of the older APIs begins with."""
    return {
        "id": f"{prefix}-{answer.number}",
        "object": kind,
        "created": answer.created,
        "model": answer.model,
    }


def write_usage(answer: Answer, num_choices: int) -> dict[str, int]:
    """Return the numbers of tokens; a prompt counts once for all its `num_choices` replies."""
    prompts = answer.replies[::num_choices]
    num_input_tokens = sum(len(reply.prompt_tokens) for reply in prompts)
    num_output_tokens = sum(len(reply.tokens) for reply in answer.replies)
    return {
        "prompt_tokens": num_input_tokens,
        "completion_tokens": num_output_tokens,
        "total_tokens": num_input_tokens + num_output_tokens,
    }


class RequestEcho(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of the request that its answer repeats."""

    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: str | None
    store: bool
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]


def write_response(answer: Answer, echo: RequestEcho, *, has_log_probs: bool) -> dict[str, Any]:
    """Return a `response`."""
    (reply,) = answer.replies
    is_cut = reply.finish_reason == "length"
    num_input_tokens, num_output_tokens = len(reply.prompt_tokens), len(reply.tokens)
    return {
        "id": f"resp_{answer.number}",
        "object": "response",
        "created_at": answer.created,
        "status": "incomplete" if is_cut else "completed",
        "background": False,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "model": answer.model,
        "output": _write_items(answer, has_log_probs=has_log_probs),
        # The one that was sampled with: the run sets it, whatever the request asked for.
        "temperature": 1.0 if reply.temperature is None else reply.temperature,
        "top_p": 1.0,
        "truncation": "disabled",
        "usage": {
            "input_tokens": num_input_tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": num_output_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": num_input_tokens + num_output_tokens,
        },
        **msgspec.to_builtins(echo),
    }


def make_stored_message(answer: Answer) -> Message:
    """Return the reply, with the ids of its calls that the client got."""
    (reply,) = answer.replies
    calls = tuple(
        msgspec.structs.replace(call, id=_make_call_id(answer, number))
        for number, call in enumerate(reply.message.tool_calls)
    )
    return msgspec.structs.replace(reply.message, tool_calls=calls)


def stream_response(body: dict[str, Any]) -> Iterator[bytes]:
    """Yield the events that build up `body`."""
    numbers = itertools.count()

    def event(kind: str, **fields: Any) -> bytes:
        return make_named_event(
            {"type": f"response.{kind}", "sequence_number": next(numbers), **fields}
        )

    opening = {
        **body,
        "status": "in_progress",
        "output": [],
        "usage": None,
        "incomplete_details": None,
    }
    yield event("created", response=opening)
    yield event("in_progress", response=opening)
    for index, item in enumerate(body["output"]):
        location = {"item_id": item["id"], "output_index": index}
        if item["type"] == "message":
            yield event(
                "output_item.added",
                output_index=index,
                item={**item, "content": [], "status": "in_progress"},
            )
            part = {**location, "content_index": 0}
            (said,) = item["content"]
            yield event("content_part.added", **part, part={**said, "text": "", "logprobs": []})
            yield event("output_text.delta", **part, delta=said["text"], logprobs=said["logprobs"])
            yield event("output_text.done", **part, text=said["text"], logprobs=said["logprobs"])
            yield event("content_part.done", **part, part=said)
        else:
            yield event(
                "output_item.added",
                output_index=index,
                item={**item, "arguments": "", "status": "in_progress"},
            )
            yield event("function_call_arguments.delta", **location, delta=item["arguments"])
            yield event(
                "function_call_arguments.done",
                **location,
                name=item["name"],
                arguments=item["arguments"],
            )
        yield event("output_item.done", output_index=index, item=item)
    yield event("completed" if body["status"] == "completed" else "incomplete", response=body)


def _write_items(answer: Answer, *, has_log_probs: bool) -> list[dict[str, Any]]:
    """Return the text, if there is one or there are no calls, and the calls."""
    (reply,) = answer.replies
    items: list[dict[str, Any]] = []
    status = "incomplete" if reply.finish_reason == "length" else "completed"
    if reply.message.content or not reply.message.tool_calls:
        text = {
            "type": "output_text",
            "text": reply.message.content,
            "annotations": [],
            "logprobs": write_log_probs(reply) if has_log_probs else [],
        }
        items.append(
            {
                "id": f"msg_{answer.number}",
                "type": "message",
                "role": "assistant",
                "status": status,
                "content": [text],
            }
        )
    items += [
        {
            "id": f"fc_{answer.number}_{number}",
            "type": "function_call",
            "call_id": _make_call_id(answer, number),
            "name": call.name,
            "arguments": call.arguments,
            "status": "completed",
        }
        for number, call in enumerate(reply.message.tool_calls)
    ]
    return items


def _make_call_id(answer: Answer, number: int) -> str:
    return f"call_{answer.number}_{number}"
