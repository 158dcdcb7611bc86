"""Answers in the format of `/v1/responses`: complete, or as the events that build them up."""

import itertools
from collections.abc import Iterator
from typing import Any

import msgspec

from vla_rl.endpoint.apis.api import Answer, named_event
from vla_rl.endpoint.apis.token_reports import listed_log_probs
from vla_rl.types import Message


class Echo(msgspec.Struct, frozen=True, kw_only=True):
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


def response_body(answer: Answer, echo: Echo, *, has_log_probs: bool) -> dict[str, Any]:
    """Return a `response`."""
    (reply,) = answer.replies
    is_cut = reply.finish_reason == "length"
    num_read, num_said = len(reply.prompt_tokens), len(reply.tokens)
    return {
        "id": f"resp_{answer.number}",
        "object": "response",
        "created_at": answer.created,
        "status": "incomplete" if is_cut else "completed",
        "background": False,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "model": answer.model,
        "output": _items(answer, has_log_probs=has_log_probs),
        "temperature": 1.0 if reply.temperature is None else reply.temperature,
        "top_p": 1.0,
        "truncation": "disabled",
        "usage": {
            "input_tokens": num_read,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": num_said,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": num_read + num_said,
        },
        **msgspec.to_builtins(echo),
    }


def said_message(answer: Answer) -> Message:
    """Return the reply, with the ids of its calls that the client got."""
    (reply,) = answer.replies
    calls = tuple(
        msgspec.structs.replace(call, id=_call_id(answer, number))
        for number, call in enumerate(reply.message.tool_calls)
    )
    return msgspec.structs.replace(reply.message, tool_calls=calls)


def response_events(body: dict[str, Any]) -> Iterator[bytes]:
    """Yield the events that build up `body`."""
    numbers = itertools.count()

    def event(kind: str, **fields: Any) -> bytes:
        return named_event({"type": f"response.{kind}", "sequence_number": next(numbers), **fields})

    begun = {
        **body,
        "status": "in_progress",
        "output": [],
        "usage": None,
        "incomplete_details": None,
    }
    yield event("created", response=begun)
    yield event("in_progress", response=begun)
    for index, item in enumerate(body["output"]):
        place = {"item_id": item["id"], "output_index": index}
        if item["type"] == "message":
            yield event(
                "output_item.added",
                output_index=index,
                item={**item, "content": [], "status": "in_progress"},
            )
            part = {**place, "content_index": 0}
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
            yield event("function_call_arguments.delta", **place, delta=item["arguments"])
            yield event(
                "function_call_arguments.done",
                **place,
                name=item["name"],
                arguments=item["arguments"],
            )
        yield event("output_item.done", output_index=index, item=item)
    yield event("completed" if body["status"] == "completed" else "incomplete", response=body)


def _items(answer: Answer, *, has_log_probs: bool) -> list[dict[str, Any]]:
    """Return the text, if there is one or there are no calls, and the calls."""
    (reply,) = answer.replies
    items: list[dict[str, Any]] = []
    status = "incomplete" if reply.finish_reason == "length" else "completed"
    if reply.message.content or not reply.message.tool_calls:
        text = {
            "type": "output_text",
            "text": reply.message.content,
            "annotations": [],
            "logprobs": listed_log_probs(reply) if has_log_probs else [],
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
            "call_id": _call_id(answer, number),
            "name": call.name,
            "arguments": call.arguments,
            "status": "completed",
        }
        for number, call in enumerate(reply.message.tool_calls)
    ]
    return items


def _call_id(answer: Answer, number: int) -> str:
    return f"call_{answer.number}_{number}"
