"""`/v1/completions`: text or tokens to continue, without a chat template."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec
import numpy as np

from vla_rl.endpoint.apis.api import Answer, Asked, Memory, data_event
from vla_rl.endpoint.apis.fields import read_fields, refuse
from vla_rl.endpoint.apis.rules import MOST_CHOICES, StructuredOutputs, require_range, stop_texts
from vla_rl.endpoint.apis.token_reports import reported_tokens
from vla_rl.endpoint.errors import RequestError, openai_error
from vla_rl.types import Completion, Prompt, ReplyOptions

MOST_LISTED: Final = 5
"""Most alternatives to a token that OpenAI lists in this API."""


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _Fields(msgspec.Struct):
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

    def __init__(self, fields: _Fields, ignored: tuple[str, ...]) -> None:
        require_range("n", fields.n, 1, MOST_CHOICES)
        require_range("max_tokens", fields.max_tokens, 1)
        require_range("logprobs", fields.logprobs, 0, MOST_LISTED)
        if fields.best_of > fields.n:
            raise refuse(
                "best_of",
                fields.best_of,
                f"at most n={fields.n}: every reply that is sampled is returned",
            )
        if fields.echo:
            raise refuse("echo", True, "false: log-probs of prompts are not computed")
        if fields.suffix:
            raise refuse("suffix", fields.suffix, "none: text is continued at its end")
        self._has_log_probs = fields.logprobs is not None
        self._wants_usage = fields.stream_options is not None and bool(
            fields.stream_options.include_usage
        )
        structured = fields.structured_outputs
        self.asked = Asked(
            prompts=_prompts(fields.prompt),
            model=fields.model,
            options=ReplyOptions(
                format=None if structured is None else structured.format(),
                stop=stop_texts(fields.stop),
                top_log_probs=fields.logprobs,
            ),
            max_tokens=fields.max_tokens,
            num_choices=fields.n,
            stream=fields.stream,
            ignored=ignored,
        )

    def whole(self, answer: Answer) -> dict[str, Any]:
        """Return a `text_completion`."""
        choices = [self._choice(index, reply) for index, reply in enumerate(answer.replies)]
        return {**_head(answer), "choices": choices, "usage": self._usage(answer)}

    def events(self, answer: Answer) -> Iterator[bytes]:
        """Yield the same, one event for each choice."""
        for index, reply in enumerate(answer.replies):
            yield data_event({**_head(answer), "choices": [self._choice(index, reply)]})
        if self._wants_usage:
            yield data_event({**_head(answer), "choices": [], "usage": self._usage(answer)})
        yield b"data: [DONE]\n\n"

    def _choice(self, index: int, reply: Completion) -> dict[str, Any]:
        return {
            "index": index,
            "text": reply.message.content,
            "finish_reason": reply.finish_reason,
            "logprobs": _log_probs(reply) if self._has_log_probs else None,
        }

    def _usage(self, answer: Answer) -> dict[str, int]:
        prompts = answer.replies[:: self.asked.num_choices]
        num_read = sum(len(reply.prompt_tokens) for reply in prompts)
        num_said = sum(len(reply.tokens) for reply in answer.replies)
        return {
            "prompt_tokens": num_read,
            "completion_tokens": num_said,
            "total_tokens": num_read + num_said,
        }


class CompletionApi:
    """Text completions."""

    path = "/v1/completions"

    def read(self, body: bytes, memory: Memory) -> CompletionRequest:
        """Read a request. Raises: RequestError."""
        return CompletionRequest(*read_fields(body, _Fields))

    def error(self, error: RequestError) -> dict[str, Any]:
        """Return an error in OpenAI's format."""
        return openai_error(error)


def _prompts(given: str | list[str | int | list[int]]) -> tuple[Prompt, ...]:
    """Read one text, one list of tokens, or a list of several of either."""
    if isinstance(given, str):
        return (given,)
    if not given:
        raise refuse("prompt", given, "a text, tokens, or a list of them that is not empty")
    if all(isinstance(each, int) for each in given):
        return (_tokens(given),)
    if any(isinstance(each, int) for each in given):
        raise refuse("prompt", given, "texts or lists of tokens, not single tokens between them")
    return tuple(each if isinstance(each, str) else _tokens(each) for each in given)  # type: ignore[arg-type]


def _tokens(given: Sequence[Any]) -> np.ndarray:
    if not all(0 <= token < 1 << 31 for token in given):
        raise refuse("prompt", given, "token ids of the policy's vocabulary")
    return np.array(given, np.int64)


def _log_probs(reply: Completion) -> dict[str, Any]:
    pairs = reported_tokens(reply)
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


def _head(answer: Answer) -> dict[str, Any]:
    return {
        "id": f"cmpl-{answer.number}",
        "object": "text_completion",
        "created": answer.created,
        "model": answer.model,
    }
