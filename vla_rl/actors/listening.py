"""The socket at which an actor's process waits for the client that launched it from another host.

It accepts one key, which came with the launch through the host's encrypted connection, and shows a
key of its own, which travels back the same way. Before a peer has shown that key it may send one
part of a message, for ten seconds; after the client has spoken, the port answers to no one else.
"""

import contextlib
import ctypes
import errno
import socket
import struct
from typing import Final, NamedTuple

import zmq

from vla_rl.actors.fork_protocol import ListenSettings
from vla_rl.actors.parts import MAX_WIRE_FRAME_BYTES
from vla_rl.actors.sockets import lift_high_water_mark
from vla_rl.actors.zap import DOMAIN, Gatekeeper

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


class ListenPlace(NamedTuple):
    """The interface and the ports at which processes of this host listen for others."""

    interface: str
    ports: tuple[int, int]


_AT_HOME: Final = ListenPlace("127.0.0.1", (0, 0))
_own_place = _AT_HOME


def own_place() -> ListenPlace:
    """Return where this process may listen: as its host serves; without a host, this machine only."""
    return _own_place


def note_own_place(place: ListenPlace) -> None:
    """Set what `own_place` returns; the program of a process that a host has started calls it."""
    global _own_place
    _own_place = place


class Listening:
    """A bound socket that accepts one peer, whose key it names to the context's gatekeeper.

    Attributes:
        socket: carries the messages.
        port, public_key: what the peer needs to connect.

    Raises: OSError with an instruction if no port is free.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        settings: ListenSettings,
        gatekeeper: Gatekeeper,
    ) -> None:
        gatekeeper.allow([settings.client_key])
        self._door = _bound(settings)
        self.port = int(self._door.getsockname()[1])
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
        self.socket.setsockopt(zmq.USE_FD, socket.dup(self._door.fileno()))
        self.socket.bind(f"tcp://{settings.interface}:{self.port}")

    def close_door(self) -> None:
        """Accept no further connection, where the kernel allows that; the open one stays.

        The port cannot simply be closed: ZeroMQ ends the connections of a socket that is unbound.
        A filter that drops each packet of the listening socket has the effect. Where the kernel
        refuses one (see `why_ports_stay_open`), a peer without the key still gets nothing.
        """
        with contextlib.suppress(OSError):
            _drop_all_packets(self._door)

    def close(self) -> None:
        """Close what `socket` does not."""
        self._door.close()


def why_ports_stay_open() -> str:
    """Return why `close_door` has no effect on this machine; empty if it has."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as trial:
        try:
            _drop_all_packets(trial)
        except OSError as error:
            return error.strerror or str(error)
    return ""


def _drop_all_packets(listening: socket.socket) -> None:
    program = ctypes.create_string_buffer(_DROP_ALL)
    filter_ = struct.pack("HP", 1, ctypes.addressof(program))
    listening.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, filter_)


def _bound(settings: ListenSettings) -> socket.socket:
    """Return a listening socket at the first free port. Raises: OSError if there is none."""
    first, last = settings.ports
    for port in range(first, last + 1):
        opened = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
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
        "actor of this host, one more for each that passes weights on or gives pictures to learner "
        "ranks, and one for each rank that gives it weights; give the host a wider range with --ports",
    )
