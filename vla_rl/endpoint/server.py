"""The endpoint: `/v1/chat/completions` and `/v1/models` in front of policies, one key an episode.

    client ──Authorization: Bearer key──► session ──► policy.generate ──► answer
                                             └── records token ids, log-probs, weight versions

A request without a valid key is refused before its body is read. It listens on this machine alone, unless asked.
"""

import asyncio
import hashlib
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

import msgspec
from aiohttp import web

from vla_rl.endpoint.config import EndpointConfig
from vla_rl.endpoint.requests import ChatRequest, RequestError, read_request
from vla_rl.endpoint.responses import error_answer, streamed_answer, whole_answer
from vla_rl.endpoint.session import Session
from vla_rl.errors import ContextOverflow
from vla_rl.types import Completion, LanguagePolicy

_STOP_GRACE_S = 1.0


class Endpoint:
    """Serves policies to clients of OpenAI's API. `async with Endpoint(config) as endpoint:` listens."""

    def __init__(self, config: EndpointConfig | None = None) -> None:
        self._config = config if config is not None else EndpointConfig()
        self._sessions: dict[bytes, Session] = {}
        self._numbers = itertools.count()
        self._runner: web.AppRunner | None = None
        self._port = 0
        self.counts: Counter[str] = Counter()
        """Answers by HTTP status, as `"200"`."""

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=self._config.max_request_kb * 1024)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_get("/v1/models", self._models)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=_STOP_GRACE_S)
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, self._config.host, self._config.port).start()
        except OSError:
            await self._runner.cleanup()
            raise
        self._port = self._runner.addresses[0][1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for session in self._sessions.values():
            session.end()
        self._sessions.clear()
        if self._runner is not None:
            await self._runner.cleanup()

    @property
    def base_url(self) -> str:
        """What a client is given as its `base_url`."""
        host = f"[{self._config.host}]" if ":" in self._config.host else self._config.host
        return f"http://{host}:{self._port}/v1"

    @contextmanager
    def session(self, policy: LanguagePolicy | Mapping[str, LanguagePolicy]) -> Iterator[Session]:
        """A key for one episode; after the block it opens nothing any more."""
        session = Session(policy, self.base_url)
        digest = _digest(session.api_key)
        self._sessions[digest] = session
        try:
            yield session
        finally:
            self._sessions.pop(digest, None)
            session.end()

    async def _models(self, request: web.Request) -> web.StreamResponse:
        session = self._session_of(request)
        if session is None:
            return self._refuse_key()
        names = session.models or (self._config.model,)
        listed = [{"id": name, "object": "model", "created": 0, "owned_by": "vla_rl"} for name in names]
        return self._answer({"object": "list", "data": listed}, 200)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        session = self._session_of(request)
        if session is None:
            return self._refuse_key()
        task = asyncio.current_task()
        assert task is not None
        session.begin(task)
        try:
            asked, ignored = read_request(await request.read())
            completion = await self._generate(session, asked)
        except web.HTTPRequestEntityTooLarge:
            told = f"the request is larger than max_request_kb={self._config.max_request_kb} KiB."
            return self._answer(error_answer(told, 413, None), 413)
        except RequestError as error:
            return self._answer(error_answer(error.message, error.status, error.code), error.status)
        headers = {"x-vla-rl-ignored": ", ".join(ignored)} if ignored else {}
        answer_id = f"chatcmpl-{next(self._numbers)}"
        if asked.stream:
            return await self._stream(request, asked, completion, answer_id, headers)
        return self._answer(whole_answer(completion, answer_id, asked.model or self._config.model), 200, headers)

    async def _generate(self, session: Session, asked: ChatRequest) -> Completion:
        try:
            agent, policy = session.policy_of(asked.model or "")
        except KeyError as error:
            raise RequestError(
                f"there is no model {asked.model!r}, expected one of {list(session.models or ())}.",
                status=404,
                code="model_not_found",
            ) from error
        try:
            completion = await policy.generate(asked.conversation(), tools=asked.tool_specs(), max_tokens=asked.limit)
        except ContextOverflow as error:
            session.overflow = error
            raise RequestError(str(error), code="context_length_exceeded") from error
        except ValueError as error:  # a conversation that the chat template refuses
            raise RequestError(str(error)) from error
        except Exception as error:  # whoever plays the episode raises it; the client cannot know what to do about it
            session.failure = error
            raise RequestError(f"the policy failed: {type(error).__name__}", status=500) from error
        if completion.finish_reason == "aborted":
            raise RequestError("the generation was given up; ask again.", status=503)
        session.record(agent, completion)
        return completion

    async def _stream(
        self, request: web.Request, asked: ChatRequest, completion: Completion, answer_id: str, headers: dict[str, str]
    ) -> web.StreamResponse:
        self.counts["200"] += 1
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache", **headers}
        )
        await response.prepare(request)
        wants_usage = asked.stream_options is not None and bool(asked.stream_options.include_usage)
        model = asked.model or self._config.model
        for chunk in streamed_answer(completion, answer_id, model, include_usage=wants_usage):
            await response.write(b"data: " + msgspec.json.encode(chunk) + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    def _session_of(self, request: web.Request) -> Session | None:
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        return self._sessions.get(_digest(key.strip())) if scheme.lower() == "bearer" else None

    def _refuse_key(self) -> web.Response:
        message = "the API key is unknown here, or its episode is over; use the session's api_key."
        return self._answer(error_answer(message, 401, "invalid_api_key"), 401)

    def _answer(self, body: dict[str, Any], status: int, headers: dict[str, str] | None = None) -> web.Response:
        self.counts[str(status)] += 1
        return web.Response(
            body=msgspec.json.encode(body), status=status, content_type="application/json", headers=headers
        )


def _digest(key: str) -> bytes:
    """What a key is looked up by: the time that takes tells nothing about other keys."""
    return hashlib.sha256(key.encode(errors="surrogatepass")).digest()
