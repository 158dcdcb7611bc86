"""A policy behind openpi's websocket protocol, for robots, simulators and benchmarks.

    client ──observation──► reader ──► engine.act ──► owed replies, in order ──► writer ──► client
                              │        (batches over all connections)
                              └── a bad observation: a text frame that names its entries

Each connection has a reader and a writer with a bounded queue between them, so a client may send its
next observation before it has the last reply, and gets replies in the order of its observations. The
protocol has no end of an episode (`reset` of openpi's client sends nothing), so a connection holds no
state but its number.
"""

import asyncio
import hmac
import itertools
import logging
import time
from collections.abc import Callable, Mapping
from http import HTTPStatus
from types import TracebackType
from typing import Annotated, Any, Final, Self

import msgspec
from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response

from vla_rl.errors import ConfigError, VlaRlError
from vla_rl.rollout.engines import ActionEngine
from vla_rl.serving.latencies import ClientLatencies, prometheus_text
from vla_rl.serving.observation_maps import ObservationReader
from vla_rl.serving.openpi_messages import decode_message, encode_message, flatten_names
from vla_rl.types import (
    ActionChunk,
    Config,
    Observation,
    PositiveFloat,
    PositiveInt,
    Sampling,
    derive_seed,
)
from vla_rl.util.listening import is_local_address, read_token, tls_context
from vla_rl.util.values import shorten_middle

logger = logging.getLogger(__name__)

QUIET_S: Final = 0.02
"""Seconds without a frame after which a connection that is being drained counts as quiet."""

MOST_LISTED: Final = 100
"""Clients whose latencies `/metrics` lists, those with the latest replies."""

MOST_ERROR: Final = 4000
"""Characters of an error that a client gets."""

GOING_AWAY: Final = 1001
"""Close code of a server that ends (RFC 6455, section 7.4.1)."""


class ServerConfig(Config, frozen=True, kw_only=True):
    """Address, limits and keys of a policy server."""

    host: str = "127.0.0.1"
    """Address to listen on. Beyond this machine, a token and TLS are required."""

    port: Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)] = 8000
    """Port to listen on; 0: any free port."""

    token_file: str | None = None
    """File with the token that clients have to send in the header `Authorization: Api-Key TOKEN`,
    as WebsocketClientPolicy(api_key=...) does. A file, because other users see a command line."""

    tls_certificate: str | None = None
    """PEM file with the certificate chain; clients then use wss://."""

    tls_key: str | None = None
    """PEM file with the certificate's private key."""

    max_connections: PositiveInt = 8192
    """Most open connections; further clients are refused with status 503 and the reason."""

    max_message_mb: PositiveInt = 64
    """Largest observation, in MB; a connection that sends more is closed."""

    max_in_flight: PositiveInt = 4
    """Observations of one connection that may wait for their replies; further ones wait in its
    socket."""

    send_timeout_s: PositiveFloat = 30.0
    """Seconds after which a client that does not read its replies is disconnected."""

    drain_timeout_s: PositiveFloat = 10.0
    """Seconds in which a server that was told to stop answers what clients have sent."""

    def __post_init__(self) -> None:
        self.require(
            (self.tls_certificate is None) == (self.tls_key is None),
            "tls_key",
            "the key of tls_certificate: both files or none",
        )
        missing = [
            option for option in ("token_file", "tls_certificate") if getattr(self, option) is None
        ]
        self.require(
            is_local_address(self.host) or not missing,
            "host",
            "127.0.0.1: an address that other machines reach needs a token and TLS, and "
            f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set",
        )


class PolicyServer:
    """Serves one policy to any number of clients; listens inside `async with`.

    Args:
        engine: answers the observations.
        reader: turns a client's entries into an observation.
        config: address, limits, keys.
        sampling: how actions are chosen; each decision gets a seed of its own.
        describe: returns plain values about the policy, for the first message to each client and
            for `/healthz`.
        check: raises ValueError for an observation that the policy cannot read, in any thread.
    """

    def __init__(
        self,
        engine: ActionEngine,
        reader: ObservationReader,
        config: ServerConfig,
        sampling: Sampling,
        describe: Callable[[], Mapping[str, Any]],
        check: Callable[[Observation], Any],
    ) -> None:
        self._engine, self._check = engine, check
        self.reader, self.config, self.sampling, self.describe = reader, config, sampling, describe
        self._token = read_token(config.token_file)
        self.draining = asyncio.Event()
        """Set when the server stops: it takes no new connection, and answers what it owes."""
        self._numbers = itertools.count()
        self._open: dict[int, ClientLatencies] = {}
        self._server: Server | None = None
        self.clients: list[ClientLatencies] = []
        """Clients that got a reply and left, the latest 1,000."""

    async def __aenter__(self) -> Self:
        config = self.config
        try:
            self._server = await serve(
                self._serve_connection,
                config.host,
                config.port,
                ssl=tls_context(config.tls_certificate, config.tls_key),
                process_request=self._process_request,
                # images do not shrink, and deflate would cost more than the policy of a small one
                compression=None,
                max_size=config.max_message_mb * 1_000_000,
                # one frame, besides those in flight: what a client sends ahead waits in its socket
                max_queue=1,
                ping_interval=20.0,
                # a client that renders in its only thread may be silent for a while
                ping_timeout=120.0,
            )
        except OSError as error:
            raise ConfigError(
                f"the server cannot listen on {config.host}:{config.port}: {error.strerror or error}; "
                "choose another --server.port (0: any free one)"
            ) from error
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Answer what clients have sent, then close."""
        assert self._server is not None
        self.draining.set()
        self._server.close(close_connections=False)
        try:
            async with asyncio.timeout(self.config.drain_timeout_s):
                await self._server.wait_closed()
        except TimeoutError:
            logger.warning("%d connections did not end in time, and are cut", len(self._open))
            for connection in self._server.connections:
                connection.transport.abort()
            await self._server.wait_closed()

    @property
    def address(self) -> str:
        """The URL that clients connect to."""
        assert self._server is not None
        port = next(iter(self._server.sockets)).getsockname()[1]
        host = f"[{self.config.host}]" if ":" in self.config.host else self.config.host
        return f"{'ws' if self.config.tls_certificate is None else 'wss'}://{host}:{port}"

    def _process_request(self, connection: ServerConnection, request: Request) -> Response | None:
        """Answer HTTP requests, and refuse connections without the token or beyond the limit."""
        path = request.path.partition("?")[0]
        if path == "/healthz":
            body = msgspec.json.encode(self.describe()).decode()
            return connection.respond(HTTPStatus.OK, body + "\n")
        if not self._has_token(request):
            return connection.respond(
                HTTPStatus.UNAUTHORIZED,
                "the token is missing or wrong, expected the header 'Authorization: Api-Key TOKEN'\n",
            )
        if path == "/metrics":
            return connection.respond(HTTPStatus.OK, self._metrics())
        if self.draining.is_set() or len(self._open) >= self.config.max_connections:
            reason = (
                "the server stops"
                if self.draining.is_set()
                else f"{len(self._open)} connections are open, which is max_connections"
            )
            return connection.respond(HTTPStatus.SERVICE_UNAVAILABLE, f"refused: {reason}\n")
        return None

    def _has_token(self, request: Request) -> bool:
        if self._token is None:
            return True
        kind, _, token = request.headers.get("Authorization", "").partition(" ")
        # as many steps for a wrong token as for the right one
        is_equal = hmac.compare_digest(token.strip().encode(), self._token.encode())
        return is_equal and kind.lower() in ("api-key", "bearer")

    def _metrics(self) -> str:
        latest = sorted([*self.clients, *self._open.values()], key=lambda each: each.last_reply_at)[
            -MOST_LISTED:
        ]
        gauges = {
            "connections": float(len(self._open)),
            "weight_version": float(self._engine.weight_version),
        }
        return prometheus_text(gauges, [each for each in latest if each.num_replies])

    async def _serve_connection(self, connection: ServerConnection) -> None:
        number = next(self._numbers)
        host, port = connection.remote_address[:2]
        latencies = ClientLatencies(client=f"{host}:{port} #{number}")
        self._open[number] = latencies
        try:
            await _Conversation(self, connection, number, latencies).serve()
        finally:
            del self._open[number]
            if latencies.num_replies:
                self.clients = [*self.clients[-999:], latencies]

    async def decide(self, observation: Observation, seed: int) -> ActionChunk:
        """Return the policy's action chunk.

        Raises: ValueError for an observation that the policy cannot read; VlaRlError.
        """
        sampling = msgspec.structs.replace(self.sampling, seed=seed)
        try:
            return await self._engine.act(observation, sampling)
        except ValueError:
            # another client's observation may be at fault, in the same batch
            await asyncio.to_thread(self._check, observation)
            return await self._engine.act(observation, sampling)


class _Conversation:
    """One connection: observations in, replies out, in order."""

    def __init__(
        self,
        server: PolicyServer,
        connection: ServerConnection,
        number: int,
        latencies: ClientLatencies,
    ) -> None:
        self._server, self._connection, self._number = server, connection, number
        self._latencies, self._decisions = latencies, itertools.count()
        self._owed: asyncio.Queue[tuple[asyncio.Task[bytes | str], float] | None] = asyncio.Queue(
            server.config.max_in_flight
        )
        self._num_owed = 0

    async def serve(self) -> None:
        """Serve until the client leaves or the server is drained."""
        try:
            await self._send(encode_message(self._server.describe()))
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._write(), name=f"replies of connection {self._number}")
                await self._read(tasks)
            await self._connection.close(GOING_AWAY, "the server stops")
        except* ConnectionClosed:
            pass  # the client left; what it was owed is dropped with its tasks
        except* TimeoutError:
            logger.warning(
                "%s did not read its replies for %g s, and is disconnected",
                self._latencies.client,
                self._server.config.send_timeout_s,
            )
            self._connection.transport.abort()

    async def _read(self, tasks: asyncio.TaskGroup) -> None:
        draining = tasks.create_task(self._server.draining.wait())
        # A client that sends as soon as it has its reply is never quiet: once the server stops, it
        # gets answers to as many observations as could have been under way.
        num_last = 0
        while num_last < self._server.config.max_in_flight:
            receiving = tasks.create_task(self._connection.recv())
            await asyncio.wait((receiving, draining), return_when=asyncio.FIRST_COMPLETED)
            while not receiving.done():
                # what the client sent before it can know of the end is still answered
                await asyncio.wait((receiving,), timeout=QUIET_S)
                if not receiving.done() and self._num_owed == 0:
                    receiving.cancel()
                    await self._owed.put(None)
                    return
            num_last += self._server.draining.is_set()
            answering = tasks.create_task(self._answer(receiving.result()))
            self._num_owed += 1
            await self._owed.put((answering, time.monotonic()))
        await self._owed.put(None)

    async def _write(self) -> None:
        while (owed := await self._owed.get()) is not None:
            answering, received_at = owed
            reply = await answering
            await self._send(reply)
            self._num_owed -= 1
            seconds = time.monotonic() - received_at
            self._latencies.add_reply(seconds, is_error=isinstance(reply, str))

    async def _send(self, reply: bytes | str) -> None:
        async with asyncio.timeout(self._server.config.send_timeout_s):
            await self._connection.send(reply)

    async def _answer(self, frame: bytes | str) -> bytes | str:
        """Return the reply to a frame; text names what was wrong with it."""
        server, started_at = self._server, time.monotonic()
        try:
            if isinstance(frame, str):
                raise ValueError("the frame is text, expected an observation in msgpack")
            observation = server.reader.read(flatten_names(decode_message(frame)))
            # not the seed of the decision alone: two clients' robots would explore alike
            seed = derive_seed(server.sampling.seed, self._number, next(self._decisions))
            chunk = await server.decide(observation, seed)
        except (ValueError, VlaRlError) as error:
            # cut: an error repeats names and texts that the client chose, of any length
            return shorten_middle(f"{type(error).__name__}: {error}", MOST_ERROR)
        except Exception as error:  # of the policy's own code: this client is told, others go on
            logger.exception("the policy failed for %s", self._latencies.client)
            return f"the policy failed: {type(error).__name__}: {error}"
        infer_ms = (time.monotonic() - started_at) * 1e3
        return encode_message(
            {
                "actions": chunk.actions,
                "weight_version": chunk.weight_version,
                "server_timing": {"infer_ms": infer_ms},
            }
        )
