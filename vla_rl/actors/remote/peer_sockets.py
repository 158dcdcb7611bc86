"""Encrypted connections between two hosts of a run: a listening socket for one peer, and the way to it.

    receiver: its key ──► sender: listens for that key alone ──► port and key ──► receiver connects

The control process carries the keys, and nothing else.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec
import zmq

from vla_rl.actors.placement import KeyPair
from vla_rl.actors.remote.direct_link import (
    CurveAuthenticator,
    DirectLink,
    ListeningSocket,
    get_own_address,
    parse_event,
)
from vla_rl.actors.wire.envelope import Frames, ListenSettings, OnMessage
from vla_rl.actors.wire.sockets import HALF_SENT_MS, BoundedSocket, LoopSocket

_LOOKS, _LOOK_EVERY_S = 100, 0.01


class SocketAddress(msgspec.Struct, frozen=True, kw_only=True):
    """The address at which a host listens for one peer, without the host."""

    port: int
    public_key: str


class ServerContext:
    """A context of ZeroMQ that several sockets share, with the authenticator that knows their keys.

    It has threads beside those of the episodes.

    Args:
        num_threads: threads that decrypt, about 1 GB/s each.
    """

    def __init__(self, num_threads: int = 1) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=num_threads)
        self.authenticator = CurveAuthenticator(self.context, [])

    def close(self) -> None:
        """End the threads. Close all sockets before."""
        self.authenticator.close()
        self.context.term()


class ServerSocket:
    """Listens for one peer.

    Args:
        peer_key: public key of the only peer that may connect.
        on_message: called with each message.
        on_lost: called once, when the peer's connection has ended; None: it is not watched.
        context: shared with other sockets, and closed after them; None: its own. Of several sockets, the
            last one replaces the keys of those before: call `context.authenticator.allow` after it.

    Raises: OSError if no port is free.
    """

    def __init__(
        self,
        peer_key: str,
        on_message: OnMessage,
        context: ServerContext | None = None,
        on_lost: Callable[[], None] | None = None,
    ) -> None:
        self._on_message, self._is_met, self._on_lost = on_message, False, on_lost
        self._is_up = False
        self._own = ServerContext() if context is None else None
        shared = context or self._own
        assert shared is not None
        settings = ListenSettings(*get_own_address(), peer_key)
        try:
            self._listening = ListeningSocket(shared.context, settings, shared.authenticator)
        except BaseException:
            if self._own is not None:
                self._own.close()
            raise
        self._monitor: LoopSocket | None = None
        if on_lost is not None:
            monitor = self._listening.socket.get_monitor_socket(
                zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
            )
            self._monitor = LoopSocket(monitor, self._on_event, raw=True)
        self._socket = LoopSocket(self._listening.socket, self._take, in_place=True)
        self.outgoing = BoundedSocket(self._socket, self._take)
        """Bounds the bytes on the way to the peer."""
        self.address = SocketAddress(
            port=self._listening.port, public_key=self._listening.public_key
        )
        """Address at which the peer connects."""

    def send_frames(self, frames: Frames) -> None:
        """Queue one message."""
        self.outgoing.send(frames)

    def close(self) -> None:
        """Close the connection."""
        if self._monitor is not None:
            self._listening.socket.disable_monitor()  # before its reader, as in `DirectLink.close`
            self._monitor.close()
        self.outgoing.close()
        self._socket.close(HALF_SENT_MS)
        self._listening.close()
        if self._own is not None:
            self._own.close()

    def _on_event(self, frames: Frames) -> None:
        if parse_event(frames) == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._is_up = True
        elif self._is_up:
            self._look(_LOOKS)

    def _look(self, num_looks: int) -> None:
        """Find out whose connection has ended: a stranger without the key has one too for a while."""
        if self._socket.is_closed or self._on_lost is None:
            return
        if not self._socket.has_peer:
            on_lost, self._on_lost = self._on_lost, None
            on_lost()
        elif num_looks:
            # ZeroMQ reports the end before the socket forgets its peer
            asyncio.get_running_loop().call_later(_LOOK_EVERY_S, self._look, num_looks - 1)

    def _take(self, frames: Frames) -> None:
        if not self._is_met:
            # the peer has shown its key: the port answers to no one else
            self._listening.refuse_connections()
            self._is_met = True
        self._on_message(frames)


@contextmanager
def open_link(
    host: str,
    socket: SocketAddress,
    keys: KeyPair,
    on_message: OnMessage,
    on_lost: Callable[[], None],
) -> Iterator[DirectLink]:
    """Connect to a peer's socket while the block is open.

    Args:
        host: address of the peer's host, without a port.
        socket: its address there.
        keys: those whose public one the peer was given.
        on_message, on_lost: as for `DirectLink`.

    Raises: ConnectionError for a socket that cannot be.
    """
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    address = f"tcp://{host}:{socket.port}"
    try:
        link = DirectLink(context, address, socket.public_key, keys, on_message, on_lost)
    except BaseException:
        context.term()
        raise
    try:
        yield link
    finally:
        link.close()
        context.term()
