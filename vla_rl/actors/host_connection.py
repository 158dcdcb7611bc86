"""Our end of the connection to another host: one encrypted socket for all actors there.

ZeroMQ's own heartbeats, sent by its thread even while our loop is busy, detect a lost host, by
default within two seconds. The socket's monitor reports it, and all actors there end for their
callers. A lost connection is not resumed: a restart makes a new one.
"""

import asyncio
from collections.abc import Callable

import msgspec
import zmq
from zmq.utils.monitor import parse_monitor_message

from vla_rl.actors.channel import Death, OnEnd, OnMessage
from vla_rl.actors.codec import Codec
from vla_rl.actors.parts import MAX_WIRE_FRAME_BYTES
from vla_rl.actors.placement import RemoteHost
from vla_rl.actors.sockets import LoopSocket, lift_high_water_mark
from vla_rl.actors.wire import (
    Birth,
    DeathNotice,
    Frames,
    Kind,
    LaunchRequest,
    MalformedMessage,
    unpack_envelope,
)

_HANDSHAKE_FAILED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
_HANDSHAKE_FAILED |= zmq.EVENT_HANDSHAKE_FAILED_AUTH


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


class HostConnection:
    """Connects at once; `is_lost` stays True once the connection was lost."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], host: RemoteHost) -> None:
        self.address, self.is_lost = host.address, False
        self._channels: dict[int, RemoteChannel] = {}
        self._next_id = 1
        socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
        set_tcp_options(socket, host.lost_after_s)
        socket.curve_serverkey = host.server_public_key.encode()
        socket.curve_publickey = host.client_keys.public.encode()
        socket.curve_secretkey = host.client_keys.secret.encode()
        monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | _HANDSHAKE_FAILED)
        self._zmq_socket = socket
        self._socket = LoopSocket(socket, self._on_message)
        self._monitor = LoopSocket(monitor, self._on_event, raw=True)
        socket.connect(host.address)

    def launch(
        self, name: str, env: dict[str, str], on_message: OnMessage, on_end: OnEnd
    ) -> "RemoteChannel":
        """Ask for a process there; its messages and its end arrive through the callbacks."""
        channel = RemoteChannel(
            self._next_id, self.address, self._socket, on_message, on_end, self._channels.pop
        )
        self._channels[channel.actor_id] = channel
        self._next_id += 1
        request = LaunchRequest(name, env)
        channel.send(channel.codec.encode(Kind.LAUNCH, 0, channel.actor_id, 0, request, name))
        return channel

    def close(self) -> None:
        """Close the connection; the host ends our actors."""
        self._lose(f"connection to {self.address} was closed")

    def _on_message(self, frames: Frames) -> None:
        try:
            kind, _, actor, _ = unpack_envelope(frames[0])
        except MalformedMessage:
            return
        channel = self._channels.get(actor)
        if channel is not None and kind != Kind.PING:
            channel.deliver(kind, frames)

    def _on_event(self, frames: Frames) -> None:
        if len(frames) != 2:
            return
        event = parse_monitor_message(list(frames))["event"]
        if event & _HANDSHAKE_FAILED:
            self._lose(f"{self.address} rejected our key, or does not have the expected server key")
        elif event == zmq.EVENT_DISCONNECTED:
            self._lose(f"connection to {self.address} is lost")

    def _lose(self, cause: str) -> None:
        if self.is_lost:
            return
        self.is_lost = True
        self._monitor.close()
        self._zmq_socket.disable_monitor()
        self._socket.close()
        for channel in list(self._channels.values()):
            channel.end(Death(channel.pid, cause))


class RemoteChannel:
    """One process on another host. See `Channel`."""

    def __init__(
        self,
        actor_id: int,
        address: str,
        socket: LoopSocket,
        on_message: OnMessage,
        on_end: OnEnd,
        forget: Callable[[int], object],
    ) -> None:
        self.actor_id, self.on_message, self._on_end = actor_id, on_message, on_end
        self.codec, self.pid, self._address = Codec(), 0, address
        self._socket, self._forget = socket, forget
        self._gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def unanswered(self) -> str:
        """Address of the host until it has sent a message about the process.

        Then an empty string.
        """
        return "" if self.pid else self._address

    is_ending = False
    """The host reports the end only when all is over."""

    def send(self, frames: Frames) -> None:
        """Queue one message; it is dropped if the host is lost."""
        self._socket.send(frames)

    def poll(self) -> None:
        """Deliver what has already arrived."""
        self._socket.drain_all()

    def kill(self) -> None:
        """Have the host kill the process.

        If the host never answered, there is no process to wait for.
        """
        self.send(self.codec.encode(Kind.KILL, 0, self.actor_id, 0, None, "kill"))
        if self.pid == 0:
            self.end(Death(0, "killed before its host answered"))

    async def until_gone(self) -> None:
        """Wait until the host reports the end of the process, or is lost itself."""
        await asyncio.shield(self._gone)

    def deliver(self, kind: int, frames: Frames) -> None:
        """Take one message for this actor."""
        try:
            if kind == Kind.DIED:
                notice = self.codec.decode(self.codec.decoder(DeathNotice), frames)
                self.end(Death(notice.pid, notice.cause, notice.last_words, notice.frozen))
                return
            if kind == Kind.HELLO:
                self.pid = self.codec.decode(self.codec.decoder(Birth), frames).pid
        except (MalformedMessage, msgspec.ValidationError):
            return
        self.on_message(frames)

    def end(self, death: Death) -> None:
        """Report the end to the owner, once."""
        if not self._gone.done():
            self._forget(self.actor_id)
            self._gone.set_result(None)
            self._on_end(death)
