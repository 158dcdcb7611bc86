"""Both ends of the encrypted connection between a caller and one process on another host.

The process listens for the client that launched it. It accepts one key, which came with the launch
through the host's encrypted connection; it shows a key of its own, which travels back the same way.
Before a peer has shown that key it may send one part of a message, for ten seconds; after the client has
spoken, the port answers to no one else.

The client connects with a key that was made for this link. A link that is lost is not resumed: the
process is ended through its host. Peers are accepted by ZeroMQ's authentication protocol (RFC 27).
"""

import contextlib
import ctypes
import errno
import logging
import socket
import struct
from collections.abc import Callable, Collection
from typing import Final, NamedTuple

import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from vla_rl.actors.placement import HIGHEST_PORT, KeyPair, is_key
from vla_rl.actors.wire.envelope import (
    MAX_WIRE_FRAME_BYTES,
    Frames,
    ListenSettings,
    OnMessage,
)
from vla_rl.actors.wire.sockets import HALF_SENT_MS, BoundedSocket, LoopSocket, lift_high_water_mark
from vla_rl.util.values import excerpt

logger = logging.getLogger(__name__)

DOMAIN = b"vla_rl"
_ENDPOINT = "inproc://zeromq.zap.01"


class CurveAuthenticator:
    """Answers the context's requests about new peers, until it is closed.

    Args:
        allowed: public keys in Z85 form.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], allowed: Collection[str]) -> None:
        self._allowed = frozenset(allowed)
        self.num_refused = 0
        socket: zmq.Socket[bytes] = context.socket(zmq.REP)
        socket.bind(_ENDPOINT)
        self._socket = LoopSocket(socket, self._on_question, raw=True)

    def set_allowed_keys(self, allowed: Collection[str]) -> None:
        """Accept peers with these keys instead."""
        self._allowed = frozenset(allowed)

    def close(self) -> None:
        """Stop answering: no new peer is accepted."""
        self._socket.close()

    def _on_question(self, frames: Frames) -> None:
        version, request_id, *_ = frames
        is_known = (
            len(frames) == 7
            and frames[2] == DOMAIN
            and frames[5] == b"CURVE"
            and self._knows(frames[6])
        )
        if not is_known:
            self.num_refused += 1
            if self.num_refused == 1:
                logger.warning(
                    "refused a peer at %s: its key is unknown. Later ones are only counted.",
                    frames[3],
                )
        # Strangers get an answer too: a REP socket may read the next question only after it.
        status = (b"200", b"OK") if is_known else (b"400", b"unknown key")
        self._socket.send([version, request_id, *status, b"", b""])

    def _knows(self, key: bytes) -> bool:
        return len(key) == 32 and z85.encode(key).decode() in self._allowed


HANDSHAKE_WITHIN_MS = 10_000
"""A connection whose peer has not shown a listed key by then is closed; until then it may hold one
part of a message."""
_SO_ATTACH_FILTER = 26  # for which Python has no name
_DROP_ALL = struct.pack("HBBI", 0x06, 0, 0, 0)  # one BPF instruction: keep 0 bytes of a packet
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3  # of malloc.h
_KEEPALIVE_AFTER_S, _KEEPALIVE_EVERY_S = 30, 10


def keep_alive(zmq_socket: zmq.Socket[bytes]) -> None:
    """Have the kernels of both ends keep an idle connection open.

    A firewall forgets an idle one after minutes. ZeroMQ's heartbeats would do it too, but they stop
    with a frozen process, whose host reports it as frozen and not as lost.
    """
    zmq_socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    zmq_socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, _KEEPALIVE_AFTER_S)
    zmq_socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, _KEEPALIVE_EVERY_S)


def keep_freed_memory() -> None:
    """Have the C library keep up to 128 MiB of freed memory for the next message.

    By default it returns the buffers of each part to the kernel, which clears them again for the
    next one: a fifth of the CPU time of a sender, measured with bare sockets.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # glibc
        libc.mallopt(_M_TRIM_THRESHOLD, 128 << 20)
        libc.mallopt(_M_TOP_PAD, 64 << 20)
        libc.mallopt(_M_MMAP_THRESHOLD, 32 << 20)


class ListenAddress(NamedTuple):
    """The interface and the ports at which processes of this host listen for others."""

    interface: str
    ports: tuple[int, int]


_LOCAL_ADDRESS: Final = ListenAddress("127.0.0.1", (0, 0))
_own_address = _LOCAL_ADDRESS


def get_own_address() -> ListenAddress:
    """Return where this process may listen: as its host serves; without a host, this machine only."""
    return _own_address


def set_own_address(address: ListenAddress) -> None:
    """Set what `get_own_address` returns; the program of a process that a host has started calls it."""
    global _own_address
    _own_address = address


class ListeningSocket:
    """A bound socket that accepts one peer, whose key it names to the context's authenticator.

    Attributes:
        socket: carries the messages.
        port, public_key: what the peer needs to connect.

    Raises: OSError with an instruction if no port is free.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        settings: ListenSettings,
        authenticator: CurveAuthenticator,
    ) -> None:
        authenticator.set_allowed_keys([settings.client_key])
        self._listener = _bind_first_free(settings)
        self.port = int(self._listener.getsockname()[1])
        public, secret = zmq.curve_keypair()
        self.public_key = public.decode()
        self.socket: zmq.Socket[bytes] = context.socket(zmq.PAIR)
        lift_high_water_mark(self.socket)
        keep_alive(self.socket)
        self.socket.setsockopt(zmq.MAXMSGSIZE, MAX_WIRE_FRAME_BYTES)
        self.socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_WITHIN_MS)
        self.socket.curve_server = True
        self.socket.curve_secretkey = secret
        self.socket.zap_domain = DOMAIN
        # ZeroMQ closes the descriptor that it gets, and we filter through ours
        self.socket.setsockopt(zmq.USE_FD, socket.dup(self._listener.fileno()))
        self.socket.bind(f"tcp://{settings.interface}:{self.port}")

    def refuse_connections(self) -> None:
        """Accept no further connection, where the kernel allows that; the open one stays.

        The port cannot simply be closed: ZeroMQ ends the connections of a socket that is unbound.
        A filter that drops each packet of the listening socket has the effect. Where the kernel
        refuses one (see `explain_open_ports`), a peer without the key still gets nothing.
        """
        with contextlib.suppress(OSError):
            _drop_all_packets(self._listener)

    def close(self) -> None:
        """Close what `socket` does not."""
        self._listener.close()


def explain_open_ports() -> str:
    """Return why `refuse_connections` has no effect on this machine; empty if it has."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            _drop_all_packets(probe)
        except OSError as error:
            return error.strerror or str(error)
    return ""


def _drop_all_packets(listening: socket.socket) -> None:
    program = ctypes.create_string_buffer(_DROP_ALL)
    filter_ = struct.pack("HP", 1, ctypes.addressof(program))
    listening.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, filter_)


def _bind_first_free(settings: ListenSettings) -> socket.socket:
    """Return a listening socket at the first free port. Raises: OSError if there is none."""
    first, last = settings.ports
    for port in range(first, last + 1):
        opened = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        # A port whose last connection ended within a minute is refused otherwise, and a range is small.
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            opened.bind((settings.interface, port))
            opened.listen()
        except OSError as error:
            opened.close()
            if error.errno != errno.EADDRINUSE:
                raise
        else:
            opened.setblocking(False)
            return opened
    raise OSError(
        errno.EADDRINUSE,
        f"no port from {first} to {last} is free at {settings.interface}, expected one for each "
        "actor of this host, one more for each that passes weights on or gives images to learner "
        "ranks, and one for each rank that gives it weights; give the host a wider range with --ports",
    )


HANDSHAKE_FAILED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL


HANDSHAKE_FAILED |= zmq.EVENT_HANDSHAKE_FAILED_AUTH


# -1 would forbid it, but then a lost connection takes along the messages that we have not read yet,
# the reason of an actor's end among them
_NEVER_MS = 24 * 3600 * 1000


def make_link_keys() -> KeyPair:
    """Return a key pair for one link."""
    public, secret = zmq.curve_keypair()
    return KeyPair(public=public.decode(), secret=secret.decode())


def parse_event(frames: Frames) -> int:
    """Return the event that a socket's monitor reports; 0 for anything else."""
    return int(parse_monitor_message(list(frames))["event"]) if len(frames) == 2 else 0


class DirectLink:
    """Connects at once.

    Args:
        address, public_key: of the process.
        keys: ours, whose public key it was given.
        on_message: called with each message.
        on_lost: called once, when no further message can come.

    Attributes:
        is_up: whether the process has shown its key.
        is_lost: whether the connection was made and has ended, or the key was wrong.

    Raises: ConnectionError for an address or a key that no process has; other hosts name them.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        public_key: str,
        keys: KeyPair,
        on_message: OnMessage,
        on_lost: Callable[[], None],
    ) -> None:
        port = address.rpartition(":")[2]
        if not (port.isascii() and port.isdigit() and 0 < int(port) <= HIGHEST_PORT):
            raise ConnectionError(
                f"address {excerpt(address)}, expected a port of 1 to {HIGHEST_PORT}"
            )
        if not is_key(public_key):
            raise ConnectionError(f"key {excerpt(public_key)}, expected 40 characters of Z85")
        self.address, self._on_lost = address, on_lost
        self.is_up = self.is_lost = False
        socket: zmq.Socket[bytes] = context.socket(zmq.PAIR)
        lift_high_water_mark(socket)
        keep_alive(socket)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_WIRE_FRAME_BYTES)
        socket.setsockopt(zmq.RECONNECT_IVL, _NEVER_MS)
        socket.curve_serverkey = public_key.encode()
        socket.curve_publickey = keys.public.encode()
        socket.curve_secretkey = keys.secret.encode()
        monitor = socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | HANDSHAKE_FAILED
        )
        self._zmq_socket = socket
        self._socket = LoopSocket(socket, on_message, in_place=True)
        self._bounded = BoundedSocket(self._socket, on_message)
        self._monitor = LoopSocket(monitor, self._on_event, raw=True)
        socket.connect(address)

    def send_frames(self, frames: Frames) -> None:
        """Queue one message; it is dropped if the link is lost."""
        self._bounded.send(frames)

    @property
    def has_room(self) -> bool:
        """See `BoundedSocket`."""
        return self._bounded.has_room

    async def wait_for_room(self) -> None:
        """See `BoundedSocket`; also returns if the link is closed."""
        await self._bounded.wait_for_room()

    def deliver_received(self) -> None:
        """Deliver what has already arrived."""
        self._socket.drain_all()

    def read_events(self) -> None:
        """Learn what has happened to the connection by now."""
        self._monitor.drain_all()

    def close(self) -> None:
        """Close the link, and report nothing more."""
        if not self._monitor.is_closed:
            # in this order: ZeroMQ's thread reports an event to an open monitor or to none. To one that
            # is closed it waits without end, and whoever disables the monitor waits for it
            self._zmq_socket.disable_monitor()
            self._monitor.close()
            self._socket.close(HALF_SENT_MS)
            self._bounded.close()

    def _on_event(self, frames: Frames) -> None:
        event = parse_event(frames)
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self.is_up = True
        elif event and not self.is_lost:
            self.is_lost = True
            self._on_lost()


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
