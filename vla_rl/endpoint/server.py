"""The endpoint: OpenAI's APIs (and Anthropic's) in front of policies, one key an episode.

    client ──Authorization: Bearer key──► session ──► policy.generate ──► answer
                                             └── records token ids, log-probs, weight versions

A request without a valid key is rejected before its body is read. By default the endpoint listens
on this machine only. Every error is a JSON body in the format of the requested API.
"""

import asyncio
import hashlib
import itertools
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import Annotated, Any, Final, Self

import msgspec
from aiohttp import web

from vla_rl.endpoint.api import Answer, ReadRequest, encode_body
from vla_rl.endpoint.completions import read_chat_request, read_completion_request
from vla_rl.endpoint.http import (
    Connection,
    ConnectionListener,
    JsonErrors,
    RequestError,
    anthropic_error,
    decode_body,
    openai_error,
    read_body,
)
from vla_rl.endpoint.messages import read_anthropic_request
from vla_rl.endpoint.responses import read_response_request
from vla_rl.endpoint.session import Session, UnrecordedSession, generate_replies, new_key
from vla_rl.types import Config, LanguagePolicies, PositiveFloat, PositiveInt
from vla_rl.util.listening import is_local_address, tls_context
from vla_rl.util.tasks import leave_group
from vla_rl.util.values import excerpt


class EndpointConfig(Config, frozen=True, kw_only=True):
    """An OpenAI-compatible endpoint in front of policies."""

    host: str = "127.0.0.1"
    """Address to listen on."""

    port: Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)] = 0
    """Port to listen on; 0: any free port."""

    allow_remote: bool = False
    """Allow a `host` that other machines can reach. Requests are not limited in rate, and encrypted
    with `tls_certificate` alone: without it, use it only in a network that you trust."""

    tls_certificate: str | None = None
    """PEM file with the certificate chain; clients then use https://."""

    tls_key: str | None = None
    """PEM file with the certificate's private key."""

    model: str = "policy"
    """Name that `/v1/models` lists if there is one policy. Requests may name any model."""

    max_request_kb: PositiveInt = 8192
    """Largest request body, in KiB; larger ones are rejected with status 413."""

    max_connections: PositiveInt = 512
    """Most open connections; further clients wait until one closes. Lowered, with a warning, to
    half of the process's free file descriptors, so that the rest of the runtime keeps the other
    half."""

    idle_timeout_s: PositiveFloat = 30.0
    """Most seconds until a connection has sent the headers of its next request; then it is
    closed."""

    body_timeout_s: PositiveFloat = 30.0
    """Most seconds until a request's body has arrived; then it is rejected with status 408."""

    def __post_init__(self) -> None:
        self.require(bool(self.model), "model", "a name")
        self.require(
            self.allow_remote or is_local_address(self.host),
            "host",
            "an address of this machine alone, unless allow_remote is set",
        )


ANTHROPIC_PATH: Final = "/v1/messages"

APIS: Final[dict[str, ReadRequest]] = {
    "/v1/chat/completions": read_chat_request,
    "/v1/responses": read_response_request,
    "/v1/completions": read_completion_request,
    ANTHROPIC_PATH: read_anthropic_request,
}


logger = logging.getLogger(__name__)

_STOP_GRACE_S: Final = 1.0
_LINGER_S: Final = 2.0
"""Seconds in which the rest of a rejected body is read and dropped, so that the client can read the
answer."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Endpoint:
    """Serves policies to clients of OpenAI's API.

    `async with Endpoint(config) as endpoint:` listens.
    """

    def __init__(self, config: EndpointConfig | None = None) -> None:
        self._config = config if config is not None else EndpointConfig()
        self._sessions: dict[bytes, Session] = {}
        self._numbers = itertools.count()
        self._runner: web.AppRunner | None = None
        self._listener: ConnectionListener | None = None
        self._tasks: asyncio.TaskGroup | None = None
        self._accepting: asyncio.Task[None] | None = None
        self.counts: Counter[str] = Counter()
        """Answers by HTTP status, such as `"200"`."""

    async def __aenter__(self) -> Self:
        app = web.Application(middlewares=[self._in_json])
        for path, read in APIS.items():
            app.router.add_post(path, partial(self._generate, read))
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/models/{model:.+}", self._model)
        # A client that goes away cancels its handler, and with it the generation: nothing is
        # sampled for nobody, and nothing of it is recorded.
        self._runner = web.AppRunner(
            app,
            handler_cancellation=True,
            shutdown_timeout=_STOP_GRACE_S,
        )
        await self._runner.setup()
        assert self._runner.server is not None
        protocol = partial(
            JsonErrors,
            self._runner.server,
            loop=asyncio.get_running_loop(),
            access_log=None,  # type: ignore[arg-type]  # as AppRunner gives it
            keepalive_timeout=self._config.idle_timeout_s,  # counts from the start of a connection
            lingering_time=_LINGER_S,
        )
        config = self._config
        self._listener = ConnectionListener(
            protocol, config.max_connections, tls_context(config.tls_certificate, config.tls_key)
        )
        try:
            await self._listener.bind(self._config.host, self._config.port)
        except OSError:
            await self._runner.cleanup()
            raise
        self._tasks = asyncio.TaskGroup()
        await self._tasks.__aenter__()
        self._accepting = self._tasks.create_task(
            self._listener.accept_connections(), name="connections of the endpoint"
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # Generations first: the server's clean-up waits for its handlers, and these wait for the
        # policy.
        for session in self._sessions.values():
            session.cancel_requests()
        self._sessions.clear()
        assert self._tasks is not None
        assert self._accepting is not None
        self._accepting.cancel()
        try:
            await leave_group(self._tasks, kind, error, trace)
        finally:
            assert self._listener is not None
            assert self._runner is not None
            self._listener.stop_listening()
            await self._runner.cleanup()

    @property
    def base_url(self) -> str:
        """The `base_url` for clients."""
        assert self._listener is not None
        host = f"[{self._config.host}]" if ":" in self._config.host else self._config.host
        scheme = "http" if self._config.tls_certificate is None else "https"
        return f"{scheme}://{host}:{self._listener.port}/v1"

    @property
    def num_connections(self) -> int:
        """Number of open connections."""
        return 0 if self._listener is None else self._listener.num_open

    @contextmanager
    def session(
        self, policy: LanguagePolicies, *, api_key: str | None = None, is_recorded: bool = True
    ) -> Iterator[Session]:
        """Make a key for one episode; it becomes invalid at the end of the block.

        Args:
            policy: one policy, or one for each agent by name.
            api_key: key of an earlier session that has ended, for clients that cannot change
                theirs; None makes a new one.
            is_recorded: whether the replies become a trajectory; False for a server that runs for
                ever, which keeps the latest conversations alone.
        """
        kind = Session if is_recorded else UnrecordedSession
        session = kind(policy, self.base_url, new_key() if api_key is None else api_key)
        digest = _digest(session.api_key)
        if digest in self._sessions:
            raise ValueError(
                "the api_key is that of a session that is not over; end that one first"
            )
        self._sessions[digest] = session
        try:
            yield session
        finally:
            self._sessions.pop(digest, None)
            session.cancel_requests()

    async def _models(self, request: web.Request) -> web.StreamResponse:
        names = self._find_session(request).models or (self._config.model,)
        listed = {"object": "list", "data": [_model(name) for name in names]}
        return self._answer(encode_body(listed), 200)

    async def _model(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["model"]
        names = self._find_session(request).models
        if names is not None and name not in names:
            raise _unknown_model(name, names)
        return self._answer(encode_body(_model(name)), 200)

    async def _generate(
        self, read_request: ReadRequest, request: web.Request
    ) -> web.StreamResponse:
        session = self._find_session(request)
        task = asyncio.current_task()
        assert task is not None
        # Before the body is read: the end of the episode ends this request as well, however slowly
        # its body comes.
        session.register_request(task)
        body = await read_body(
            request, self._config.max_request_kb * 1024, self._config.body_timeout_s
        )
        try:
            read = await decode_body(body, lambda data: read_request(data, session))
        except RecursionError as error:
            raise RequestError("the body is nested too deeply", code="invalid_json") from error
        try:
            agent, policy = session.find_policy(read.asked.model)
        except KeyError as error:
            raise _unknown_model(read.asked.model, session.models or ()) from error
        # Whole, also for a stream: a reply that fails after a part of it was sent could be neither
        # taken back nor trained on.
        replies = await generate_replies(read.asked, policy, session)
        model = read.asked.model or self._config.model
        answer = Answer(number=str(next(self._numbers)), model=model, replies=replies)
        headers = {"x-vla-rl-ignored": ", ".join(read.asked.ignored)} if read.asked.ignored else {}
        try:
            # Written before the call is recorded: what the policy wrote once failed the answer of a
            # call that was in the trajectory already.
            written = (
                list(read.stream_events(answer))
                if read.asked.stream
                else [encode_body(read.write_body(answer))]
            )
        except Exception as error:  # as if the policy had failed: the episode raises it
            session.failure = error
            raise RequestError(f"the answer cannot be written: {error}", status=500) from error
        for reply in replies:  # only now, because a request that fails has no reply to train on
            session.record_call(agent, reply)
        if read.asked.stream:
            return await self._stream(request, written, headers)
        return self._answer(written[0], 200, headers)

    async def _stream(
        self, request: web.Request, events: Sequence[bytes], headers: dict[str, str]
    ) -> web.StreamResponse:
        self.counts["200"] += 1
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache", **headers}
        )
        # A connection that may bring another request is worth less than one that waits in the
        # backlog with its first.
        self._close_if_crowded(response)
        await response.prepare(request)
        for event in events:
            await response.write(event)
        await response.write_eof()
        return response

    @web.middleware
    async def _in_json(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answer every error in the format of the requested API."""
        try:
            return await handler(request)
        except RequestError as found:
            error = found
        except web.HTTPNotFound:
            error = RequestError(
                f"there is nothing at {request.path}, expected one of {_PATHS}.", status=404
            )
        except web.HTTPMethodNotAllowed as found:
            allowed = ", ".join(sorted(found.allowed_methods))
            error = RequestError(
                f"{request.method} {request.path} is not allowed, expected {allowed}.", status=405
            )
        except web.HTTPException as found:  # such as a header that aiohttp rejects
            error = RequestError(found.text or found.reason, status=found.status)
        except Exception as found:
            logger.exception("the endpoint could not answer %s %s", request.method, request.path)
            error = RequestError(f"the endpoint failed: {type(found).__name__}", status=500)
        is_anthropics = request.path.startswith(ANTHROPIC_PATH)
        body = (anthropic_error if is_anthropics else openai_error)(error)
        response = self._answer(encode_body(body), error.status)
        # Without reading the rest of a rejected body, the next request on this connection cannot be
        # found; and the rest is not worth reading.
        if not request.content.is_eof():
            response.force_close()
        return response

    def _find_session(self, request: web.Request) -> Session:
        """Return the session of a request's key. Raises: RequestError if there is none."""
        # OpenAI's clients send a bearer token, Anthropic's a header of their own. Either opens
        # every API, because an episode has one key.
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        shown = key if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")
        session = self._sessions.get(_digest(shown.strip()))
        if session is None:
            raise RequestError(
                "the API key is unknown here, or its episode is over; use the session's api_key.",
                status=401,
                code="invalid_api_key",
            )
        connection = None if request.transport is None else request.transport.get_protocol()
        if isinstance(connection, Connection):
            connection.listener.note_key(connection)
        return session

    def _answer(
        self, body: bytes, status: int, headers: dict[str, str] | None = None
    ) -> web.Response:
        self.counts[str(status)] += 1
        response = web.Response(
            body=body,
            status=status,
            content_type="application/json",
            headers=headers,
        )
        self._close_if_crowded(response)
        return response

    def _close_if_crowded(self, response: web.StreamResponse) -> None:
        if self._listener is not None and self._listener.is_crowded:
            response.force_close()


_PATHS: Final = ", ".join([*APIS, "/v1/models"])


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "vla_rl"}


def _unknown_model(name: str, names: tuple[str, ...]) -> RequestError:
    return RequestError(
        f"there is no model {excerpt(name)}, expected one of {list(names)}.",
        status=404,
        code="model_not_found",
        param="model",
    )


def _digest(key: str) -> bytes:
    """Hash a key for the table of sessions.

    The time of a look-up then reveals nothing about other keys.
    """
    # Bytes that are no UTF-8 arrive from a header as surrogates; such a key is wrong, and no error
    # of encoding.
    return hashlib.sha256(key.encode(errors="surrogatepass")).digest()
