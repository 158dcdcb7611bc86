"""HTTP connections of the endpoint: limited in number, size and time, with errors in JSON.

    kernel's backlog ─► accept one ─► is there room? ─► Connection ─► aiohttp's protocol
                                          └── if not: the oldest stranger is closed, or it waits for one to close

A stranger is a connection that has not shown a valid key for a while. One new connection at a time
is accepted; the others wait in the backlog, where they use no file descriptor.

A bad request line, a bad header, an unknown expectation: aiohttp answers them in plain text, which a
client of OpenAI's API cannot read. Here every error has a status and a JSON body, which the client's
library turns into an exception.
"""

import asyncio
import errno
import logging
import os
import resource
import socket
import ssl
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, Final, TypeVar

import msgspec
from aiohttp import web

from vla_rl.util.foreign_data import repair_unicode

MAX_MESSAGE_CHARS: Final = 600
"""Characters of an error's message; it may repeat what a client sent, whose begin and end are kept."""

_TYPES: Final = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class RequestError(Exception):
    """A request that is rejected.

    Args:
        message: what was wrong and what was expected.
        status: HTTP status.
        code: OpenAI's error code, if there is one.
        param: the field of the request that is wrong.
    """

    def __init__(
        self, message: str, *, status: int = 400, code: str | None = None, param: str | None = None
    ) -> None:
        self.message, self.status, self.code = _shorten(message), status, code
        self.param = None if param is None else _shorten(param)
        super().__init__(self.message)

    @property
    def kind(self) -> str:
        """OpenAI's `type` of the error."""
        return _TYPES.get(
            self.status, "invalid_request_error" if self.status < 500 else "server_error"
        )


def openai_error(error: RequestError) -> dict[str, Any]:
    """Return the body of an error in OpenAI's format."""
    return {
        "error": {
            "message": error.message,
            "type": error.kind,
            "param": error.param,
            "code": error.code,
        }
    }


def anthropic_error(error: RequestError) -> dict[str, Any]:
    """Return the body of an error in Anthropic's format."""
    kind = "api_error" if error.status >= 500 else error.kind
    return {"type": "error", "error": {"type": kind, "message": error.message}}


def _shorten(text: str) -> str:
    """Return a text of at most `MOST_WORDS` characters that UTF-8 can hold."""
    if len(text) > MAX_MESSAGE_CHARS:
        half = MAX_MESSAGE_CHARS // 2 - 3
        text = f"{text[:half]} ... {text[-half:]}"
    return repair_unicode(text)


INLINE_BYTES: Final = 1 << 16
"""Most bytes of a body that is decoded in the event loop, in a fraction of a millisecond; larger
ones take a thread."""

T = TypeVar("T")


async def read_body(request: web.BaseRequest, max_bytes: int, timeout_s: float) -> bytes:
    """Return the whole body.

    Raises: RequestError if it is too large, does not arrive in time, or is not encoded as its
    headers say.
    """
    # The declared length first: a client that announces too much is refused before it sends it. One
    # that declares nothing is cut off while it sends.
    if request.content_length is not None and request.content_length > max_bytes:
        raise _make_too_large_error(max_bytes)
    body = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            async for part in request.content.iter_any():
                body += part
                if len(body) > max_bytes:
                    raise _make_too_large_error(max_bytes)
    except TimeoutError as error:
        raise RequestError(
            f"the body did not arrive within body_timeout_s={timeout_s:g} s; {len(body)} bytes of "
            "it did.",
            status=408,
        ) from error
    except web.RequestPayloadError as error:
        encoding = request.headers.get("Content-Encoding", "identity")
        raise RequestError(
            f"the body is not what its headers say (Content-Encoding: {encoding[:40]}): "
            f"{type(error.__cause__ or error).__name__}; expected JSON, plain or compressed so."
        ) from error
    return bytes(body)


async def decode_body(body: bytes, decode: Callable[[bytes], T]) -> T:
    """Return `decode(body)`, computed in a thread if the body is large."""
    return decode(body) if len(body) <= INLINE_BYTES else await asyncio.to_thread(decode, body)


def _make_too_large_error(max_bytes: int) -> RequestError:
    return RequestError(
        f"the request is larger than max_request_kb={max_bytes // 1024} KiB.", status=413
    )


logger = logging.getLogger(__name__)


class JsonErrors(web.RequestHandler):
    """aiohttp's protocol of one connection, with JSON for errors."""

    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Return the answer to what is no request; close the connection.

        Raises: ConnectionError if an answer has begun already.
        """
        # Bytes of an answer are on their way: a second one behind them would be read as a part of
        # the first.
        if request.writer.output_size > 0:
            raise ConnectionError("an answer has begun, so no error can be sent") from exc
        if status >= 500:
            logger.error("the endpoint could not answer %s", request.path, exc_info=exc)
        words = " ".join((message or HTTPStatus(status).phrase).split())
        response = json_error(RequestError(words, status=status))
        # Where a bad request ends is unknown, so what follows on this connection cannot be told
        # from its rest.
        response.force_close()
        return response

    def log_exception(self, *args: Any, **kwargs: Any) -> None:
        """Log what a client did wrong for debugging only; it is in the answer."""
        logger.debug(*args, **kwargs)

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Send an answer; an error that is no JSON yet, such as an unknown `Expect`, becomes it."""
        # aiohttp makes this answer itself, past the handler and every middleware.
        if isinstance(resp, web.HTTPException):
            resp = json_error(RequestError(resp.text or resp.reason, status=resp.status))
            resp.force_close()
        return await super().finish_response(request, resp, start_time)


def json_error(error: RequestError) -> web.Response:
    """Return the answer for an error of a request whose API is not known."""
    return web.Response(
        body=msgspec.json.encode(openai_error(error)),
        status=error.status,
        content_type="application/json",
    )


_BACKLOG: Final = 1024
_PAUSE_S: Final = 0.1
_GRACE_S: Final = 1.0
"""Seconds until a connection that has not shown a key may be closed to make room."""

_OUT_OF_DESCRIPTORS: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class ConnectionListener:
    """Accepts connections for a protocol.

    Args:
        make: makes a protocol for each connection.
        max_connections: most open connections.
        tls: TLS settings; None: connections are not encrypted.
    """

    def __init__(
        self,
        make: Callable[[], asyncio.Protocol],
        max_connections: int,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._make, self._max, self._tls = make, max_connections, tls
        self._open: set[Connection] = set()
        self._strangers: dict[Connection, None] = {}
        self._closed_one = asyncio.Event()
        self._socket: socket.socket | None = None

    @property
    def port(self) -> int:
        """The port that the listener is bound to."""
        assert self._socket is not None
        port: int = self._socket.getsockname()[1]
        return port

    @property
    def num_open(self) -> int:
        """Number of open connections."""
        return len(self._open)

    @property
    def is_crowded(self) -> bool:
        """Whether half of the connections are in use.

        Idle ones should then not stay open for a later request.
        """
        return 2 * len(self._open) > self._max

    async def bind(self, host: str, port: int) -> None:
        """Start to listen. Raises: OSError if the address is not available."""
        # Only the first address of a name: with port 0 a second socket would get another port.
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, *_, address = found[0]
        self._socket = socket.create_server(address[:2], family=family, backlog=_BACKLOG)
        self._socket.setblocking(False)
        self._max = _limit_connections(self._max)

    # who waits             for              woken by
    # `accept_connections`  a connection     the kernel, while its backlog is not empty
    # `_wait_for_room`      `_closed_one`    a connection that closes; `_GRACE_S` after the oldest stranger has come

    async def accept_connections(self) -> None:
        """Accept connections until cancelled."""
        loop = asyncio.get_running_loop()
        assert self._socket is not None
        while True:
            try:
                # By hand, because asyncio's server accepts as many connections at once as wait in
                # the backlog, before anybody could ask whether there is room.
                accepted, _ = await loop.sock_accept(self._socket)
            except OSError as error:
                # other errors come from a client that is gone
                if error.errno in _OUT_OF_DESCRIPTORS:
                    logger.warning(
                        "the endpoint cannot accept a connection (%s); it tries again", error
                    )
                    await asyncio.sleep(_PAUSE_S)
                continue
            try:
                await self._wait_for_room()
                await loop.connect_accepted_socket(self._connection, accepted, ssl=self._tls)
            except OSError:
                accepted.close()
            except asyncio.CancelledError:
                accepted.close()
                raise

    def stop_listening(self) -> None:
        """Stop listening; the protocols close the open connections."""
        if self._socket is not None:
            self._socket.close()

    def note_key(self, connection: "Connection") -> None:
        """Record that a connection has shown a valid key, so that it is no stranger."""
        self._strangers.pop(connection, None)

    def note_open(self, connection: "Connection") -> None:
        """Record that a connection was made."""
        self._open.add(connection)
        self._strangers[connection] = None

    def note_closed(self, connection: "Connection") -> None:
        """Record that a connection was closed."""
        self._open.discard(connection)
        self._strangers.pop(connection, None)
        self._closed_one.set()

    def _connection(self) -> "Connection":
        return Connection(self._make(), self)

    async def _wait_for_room(self) -> None:
        while len(self._open) >= self._max:
            self._closed_one.clear()
            # never a client with a key: two hundred silent connections once kept `spawn` from descriptors
            oldest = next(iter(self._strangers), None)
            if oldest is None:
                await self._closed_one.wait()
                continue
            try:
                async with asyncio.timeout_at(oldest.made_at + _GRACE_S):
                    await self._closed_one.wait()
            except TimeoutError:
                if oldest in self._strangers:
                    oldest.abort()
                    await self._closed_one.wait()


class Connection(asyncio.Protocol):
    """Forwards everything to its protocol, and reports start and end to the listener."""

    def __init__(self, inner: asyncio.Protocol, listener: ConnectionListener) -> None:
        self._inner, self.listener = inner, listener
        self._transport: Any = None
        self.made_at = asyncio.get_running_loop().time()
        """Time of the connection's start, by the clock of the loop."""

    def abort(self) -> None:
        """Close at once."""
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self.listener.note_open(self)
        self._inner.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self._inner.eof_received()

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self.listener.note_closed(self)
        self._inner.connection_lost(exc)


def _limit_connections(wanted: int) -> int:
    """Lower a number of connections so that half of the free descriptors remain.

    The rest of the process needs them.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return wanted
    num_free = limit - len(os.listdir("/proc/self/fd"))
    affordable = max(1, num_free // 2)
    if affordable >= wanted:
        return wanted
    logger.warning(
        "the endpoint accepts %d connections instead of max_connections=%d, because the process "
        "may open only %d more files; raise `ulimit -n`",
        affordable,
        wanted,
        num_free,
    )
    return affordable
