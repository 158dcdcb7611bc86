"""Messages between a runtime and its fork server.

They use a private socket pair that closes with either end.

One message is one packet: a struct as JSON, and the file descriptors that go with it. The
preparation is not a message, because it may be large: it is in the file that is the server's stdin.
"""

import os
import socket

import msgspec

from vla_rl.actors.placement import PrepareHook
from vla_rl.util.error_reports import ErrorReport

_MAX_BYTES = 1 << 18
_MAX_FDS = 5


class ListenSettings(msgspec.Struct, frozen=True):
    """Address at which a process waits for the client that launched it from another host."""

    interface: str
    """Numeric address to bind to."""
    ports: tuple[int, int]
    """First and last port to choose from; (0, 0) for any free one."""
    client_key: str
    """Public key of the only peer that is accepted."""
    takes_over: bool = False
    """Whether the process waits for another client if it loses this one."""


class ChildSettings(msgspec.Struct, frozen=True):
    """Settings of a child process, and how it reaches its parent."""

    name: str
    actor_id: int
    address: str
    parent_pid: int
    sys_path: list[str] | None
    """None keeps that of the interpreter."""
    arena_in: int
    """File descriptor of the arena that the child reads; -1 without shared memory."""
    arena_out: int
    pulse: int
    """File descriptor of the page with the child's heartbeat; -1 if it is not observed."""
    listens: ListenSettings | None = None
    """Given by a host: messages go to and from the client directly. None at home, where they go
    through `address`."""

    @property
    def shared_fds(self) -> dict[str, int]:
        """Descriptors of memory that the child shares with its parent, by their field."""
        fds = {"arena_in": self.arena_in, "arena_out": self.arena_out, "pulse": self.pulse}
        return {field: fd for field, fd in fds.items() if fd >= 0}


class Preparation(msgspec.Struct, frozen=True):
    """Work of a server before its first fork."""

    sys_path: list[str] | None
    imports: tuple[str, ...]
    hooks: tuple[PrepareHook, ...]


class Fork(msgspec.Struct, frozen=True):
    """Request to fork one child.

    Descriptors: the pipe it dies with, its stderr, and the settings' `shared_fds` in order.
    """

    number: int
    settings: ChildSettings
    env: dict[str, str]


class Preparing(msgspec.Struct, frozen=True, tag=True):
    """Current step of the preparation."""

    what: str


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Prepared; forks follow requests from now on."""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """Preparation failed; the server ends."""

    report: ErrorReport


class Forked(msgspec.Struct, frozen=True, tag=True):
    """The child of a request, with its pidfd."""

    number: int
    pid: int


class Refused(msgspec.Struct, frozen=True, tag=True):
    """A request that was rejected."""

    number: int
    reason: str


class Ended(msgspec.Struct, frozen=True, tag=True):
    """A child was reaped.

    `returncode` as in subprocess: minus the signal number if a signal ended it.
    """

    number: int
    returncode: int


Reply = Preparing | Ready | Failed | Forked | Refused | Ended
_requests = msgspec.json.Decoder(Fork)
_replies = msgspec.json.Decoder(Reply)


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Return two connected sockets that keep message boundaries and carry descriptors."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send(end: socket.socket, message: Fork | Reply, fds: list[int]) -> None:
    """Send one message. Raises: OSError if the other end is closed or the message does not fit."""
    socket.send_fds(end, [msgspec.json.encode(message)], fds)


def receive_request(end: socket.socket) -> tuple[Fork, list[int]] | None:
    """Return the next request and its descriptors; None if the runtime has ended."""
    data, fds = _receive(end)
    return (_requests.decode(data), fds) if data else None


def receive_reply(end: socket.socket) -> tuple[Reply, list[int]] | None:
    """Return the next reply and its descriptors; None if the server has ended.

    Raises: BlockingIOError if there is none.
    """
    data, fds = _receive(end)
    return (_replies.decode(data), fds) if data else None


def _receive(end: socket.socket) -> tuple[bytes, list[int]]:
    try:
        data, fds, _, _ = socket.recv_fds(end, _MAX_BYTES, _MAX_FDS)
    except ConnectionResetError:
        return b"", []
    for fd in fds:
        os.set_inheritable(fd, False)
    return data, fds
