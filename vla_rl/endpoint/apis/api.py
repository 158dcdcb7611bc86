"""The interface of an API: reading its requests, and writing its answers.

body ─► Api.read ─► ApiRequest ─► .asked ─► (the policy generates) ─► .whole(answer)  or  .events(answer)
"""

import json
import time
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import msgspec

from vla_rl.endpoint.errors import RequestError
from vla_rl.types import ANY_REPLY, Completion, Message, Prompt, ReplyOptions, ToolSpec
from vla_rl.util.foreign_data import repair_unicode


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """A request to the policy, from any API."""

    prompts: tuple[Prompt, ...]
    """Prompts of the request: one for a conversation; text completions may have several."""

    model: str = ""
    tools: tuple[ToolSpec, ...] = ()
    options: ReplyOptions = ANY_REPLY

    max_tokens: int | None = None
    """Most tokens of a reply; None: no limit in the request."""

    num_choices: int = 1
    """Replies to each prompt."""

    stream: bool = False
    """Answer with events instead of one body."""

    ignored: tuple[str, ...] = ()
    """Names of the request's fields that were not read."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """The policy's replies to one request."""

    number: str
    """Number of the answer, unique at this endpoint; part of all ids."""

    model: str
    """Name of the model in the request."""

    replies: tuple[Completion, ...]
    """Replies, prompt by prompt, `num_choices` for each."""

    created: int = msgspec.field(default_factory=lambda: int(time.time()))


class ApiRequest(Protocol):
    """One request after it was read."""

    @property
    def asked(self) -> Asked:
        """The request to the policy."""
        ...

    def whole(self, answer: Answer) -> dict[str, Any]:
        """Return the body of the answer."""
        ...

    def events(self, answer: Answer) -> Iterator[bytes]:
        """Yield the same answer as server-sent events."""
        ...


class Memory(Protocol):
    """Conversations that a later request may continue by the id of an answer."""

    def recall(self, answer_id: str) -> Sequence[Message] | None:
        """Return the conversation up to that answer; None if there is none."""
        ...

    def remember(self, answer_id: str, conversation: Sequence[Message]) -> None:
        """Store a conversation until the session ends."""
        ...


class Api(Protocol):
    """One API of the endpoint."""

    @property
    def path(self) -> str:
        """Path that clients post requests to."""
        ...

    def read(self, body: bytes, memory: Memory) -> ApiRequest:
        """Read a request, in any thread. Raises: RequestError if it is invalid or not supported."""
        ...

    def error(self, error: RequestError) -> dict[str, Any]:
        """Return the body of an error."""
        ...


def encoded(body: dict[str, Any]) -> bytes:
    """Encode an answer as JSON; half a surrogate pair of a policy becomes U+FFFD."""
    try:
        return msgspec.json.encode(body)
    except UnicodeEncodeError:
        return repair_unicode(json.dumps(body, ensure_ascii=False)).encode()


def data_event(body: dict[str, Any]) -> bytes:
    """Encode a server-sent event without a name."""
    return b"data: " + encoded(body) + b"\n\n"


def named_event(body: dict[str, Any]) -> bytes:
    """Encode a server-sent event that is named by the `type` of its body."""
    return f"event: {body['type']}\n".encode() + data_event(body)
