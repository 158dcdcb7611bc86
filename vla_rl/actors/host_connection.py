"""Our end of the connection to a host: one encrypted socket, to launch and to hear of deaths.

ZeroMQ's own heartbeats, sent by its thread even while our loop is busy, detect a lost host, by
default within two seconds. The socket's monitor reports it, and all actors there end for their
callers. A lost connection is not resumed: a restart makes a new one.
"""

import asyncio
import itertools
import time
from typing import Final

import msgspec
import zmq

from vla_rl.actors.channel import Death, OnEnd, OnMessage
from vla_rl.actors.codec import Codec
from vla_rl.actors.direct_link import HANDSHAKE_FAILED, event_of
from vla_rl.actors.parts import MAX_WIRE_FRAME_BYTES
from vla_rl.actors.placement import HIGHEST_PORT, ChildProcess, RemoteHost, is_key
from vla_rl.actors.remote_channel import RemoteChannel
from vla_rl.actors.sockets import LoopSocket, lift_high_water_mark
from vla_rl.actors.wire import Frames, Kind, MalformedMessage, PrepareRequest, unpack_envelope
from vla_rl.errors import ActorDied, ConfigError
from vla_rl.util.error_reports import ErrorReport, restore_error
from vla_rl.util.values import excerpt

CONNECT_AGAIN_MS: Final = 2000
"""Time after which a connection that is not accepted is tried anew. TCP itself asks again after 1, 3, 7
and 15 s, so that a host whose cable is plugged in was found up to 20 s later."""


def set_tcp_options(socket: zmq.Socket[bytes], lost_after_s: float) -> None:
    """Set the TCP options of both ends.

    `lost_after_s` is how long the other end may be silent.

    ZeroMQ's HEARTBEAT_TTL, by which an end could announce this itself, is not enough: any message
    but a ping stops that clock.
    """
    lost_after_ms = round(1000 * lost_after_s)
    lift_high_water_mark(socket)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_WIRE_FRAME_BYTES)
    socket.setsockopt(zmq.HEARTBEAT_IVL, lost_after_ms // 3)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, lost_after_ms)
    socket.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_AGAIN_MS)


def require_reachable(host: RemoteHost) -> None:
    """Raise ConfigError for keys or an address that ZeroMQ would refuse."""
    keys = (host.server_public_key, host.client_keys.public, host.client_keys.secret)
    names = ("server_public_key", "client_keys.public", "client_keys.secret")
    for name, key in zip(names, keys, strict=True):
        if not is_key(key):
            raise ConfigError(
                f"{name} for {host.address} has {len(key)} characters, expected 40 characters of Z85; "
                "read it from the files that `python -m vla_rl.actors.keys` makes."
            )
    name, _, port = host.address.removeprefix("tcp://").rpartition(":")
    if not name or not (port.isascii() and port.isdigit() and 0 < int(port) <= HIGHEST_PORT):
        raise ConfigError(
            f"address is {excerpt(host.address)}, expected tcp://host:port of a vla_rl.actors.host "
            f"server, with a port of 1 to {HIGHEST_PORT}."
        )


class HostConnection:
    """Connects at once; `is_lost` stays True once the connection was lost.

    Raises: ConfigError for keys or an address that no host has.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], host: RemoteHost) -> None:
        require_reachable(host)
        self.address, self.is_lost = host.address, False
        self._context, self._codec = context, Codec()
        self._channels: dict[int, RemoteChannel] = {}
        self._preparations: dict[int, asyncio.Future[None]] = {}
        self._numbers = itertools.count(1)
        self._connected: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._heard_s = 0.0
        socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
        set_tcp_options(socket, host.lost_after_s)
        socket.curve_serverkey = host.server_public_key.encode()
        socket.curve_publickey = host.client_keys.public.encode()
        socket.curve_secretkey = host.client_keys.secret.encode()
        monitor = socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | HANDSHAKE_FAILED
        )
        self._zmq_socket = socket
        self._socket = LoopSocket(socket, self._on_message)
        self._monitor = LoopSocket(monitor, self._on_event, raw=True)
        socket.connect(host.address)

    def launch(
        self, name: str, host: RemoteHost, on_message: OnMessage, on_end: OnEnd
    ) -> RemoteChannel:
        """Ask for a process there; its messages and its end arrive through the callbacks."""
        channel = RemoteChannel(
            next(self._numbers),
            self.address,
            self._socket,
            self._context,
            on_message,
            on_end,
            self._channels.pop,
        )
        self._channels[channel.actor_id] = channel
        channel.launch(name, host.launched_process, host.takeover)
        return channel

    async def prepare(self, process: ChildProcess, connect_within_s: float) -> None:
        """Have the interpreter and the fork server of a process prepared there.

        Raises: what preparing it here would raise; ActorDied if the host is lost meanwhile;
            TimeoutError if nothing answers at its address in time.
        """
        try:
            async with asyncio.timeout(connect_within_s):
                await asyncio.shield(self._connected)
        except TimeoutError:
            raise TimeoutError(
                f"no answer from {self.address} within {connect_within_s} s; expected `python -m "
                "vla_rl.actors.host` to serve there, at an address that this host can reach."
            ) from None
        number = next(self._numbers)
        answer = self._preparations[number] = asyncio.get_running_loop().create_future()
        request = PrepareRequest(process)
        try:
            self._socket.send(self._codec.encode(Kind.PREPARE, 0, 0, number, request, "prepare"))
            await self._answered(answer, process.most_preparation_s, connect_within_s)
        finally:
            del self._preparations[number]

    async def _answered(
        self, answer: "asyncio.Future[None]", within_s: float, silent_within_s: float
    ) -> None:
        """Wait for an answer of the host, which sends a sign of life several times a second.

        Raises: TimeoutError if it was silent for so long, or does not answer at all.
        """
        began_s = self._heard_s = time.monotonic()
        while not answer.done():
            now = time.monotonic()
            left_s = min(began_s + within_s, self._heard_s + silent_within_s) - now
            if left_s <= 0:
                silent_s = now - self._heard_s
                what = (
                    f"was silent for {silent_s:.3g} s"
                    if silent_s >= silent_within_s
                    else f"did not answer within {within_s:g} s"
                )
                raise TimeoutError(
                    f"{self.address} {what} while it prepared a process; expected `python -m "
                    "vla_rl.actors.host` of the same version to serve there."
                )
            await asyncio.wait([answer], timeout=left_s)
        answer.result()

    def close(self) -> None:
        """Close the connection; the host ends our actors."""
        self._lose(f"connection to {self.address} was closed")

    def _on_message(self, frames: Frames) -> None:
        self._heard_s = time.monotonic()
        try:
            kind, _, actor, call = unpack_envelope(frames[0])
        except MalformedMessage:
            return
        if call in self._preparations:
            self._on_prepared(self._preparations[call], kind, frames)
        channel = self._channels.get(actor)
        if channel is not None and kind != Kind.PING:
            channel.take_from_host(kind, frames)

    def _on_prepared(self, answer: "asyncio.Future[None]", kind: int, frames: Frames) -> None:
        if answer.done():
            return
        if kind == Kind.PREPARED:
            answer.set_result(None)
        elif kind == Kind.ERROR:
            name = f"fork server of {self.address}"
            try:
                report = self._codec.decode(self._codec.decoder(ErrorReport), frames)
            except (MalformedMessage, msgspec.ValidationError) as error:
                answer.set_exception(ActorDied(name, 0, f"its answer cannot be read: {error}"))
            else:
                answer.set_exception(restore_error(report, name, 0))

    def _on_event(self, frames: Frames) -> None:
        event = event_of(frames)
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            if not self._connected.done():
                self._connected.set_result(None)
        elif event & HANDSHAKE_FAILED:
            self._lose(f"{self.address} rejected our key, or does not have the expected server key")
        elif event == zmq.EVENT_DISCONNECTED:
            self._lose(f"connection to {self.address} is lost")

    def _lose(self, cause: str) -> None:
        if self.is_lost:
            return
        self.is_lost = True
        self._zmq_socket.disable_monitor()  # before its reader closes, as in `DirectLink.close`
        self._monitor.close()
        self._socket.close()
        error = ActorDied(f"fork server of {self.address}", 0, cause)
        for waiting in (self._connected, *self._preparations.values()):
            if not waiting.done():
                waiting.set_exception(error)
                waiting.exception()  # perhaps nothing waits
        for channel in list(self._channels.values()):
            channel.end(Death(channel.pid, cause))
