"""What a runtime and its fork server say to each other, over a private pair of sockets that closes with either.

One message is one packet: a struct as JSON, and the file descriptors that go with it. What to prepare is no message: it may
be large, and stands in the file that is the server's stdin.
"""

import os
import socket

import msgspec

from vla_rl.actors.placement import PrepareHook
from vla_rl.actors.remote_errors import ErrorReport

_MAX_BYTES = 1 << 18
_MAX_FDS = 5


class ChildSettings(msgspec.Struct, frozen=True):
    """A child's first words: who it is, and how it reaches its parent."""

    name: str
    actor_id: int
    endpoint: str
    parent_pid: int
    sys_path: list[str] | None
    """None leaves it as the interpreter has it."""
    arena_in: int
    """File descriptor of the arena that the child reads; -1 without shared memory."""
    arena_out: int
    pulse: int
    """File descriptor of the page in which the child beats; -1 if it is not observed."""

    @property
    def shared_fds(self) -> dict[str, int]:
        """Descriptors of the memory that the child shares with its parent, by the field that names them."""
        fds = {"arena_in": self.arena_in, "arena_out": self.arena_out, "pulse": self.pulse}
        return {field: fd for field, fd in fds.items() if fd >= 0}


class Preparation(msgspec.Struct, frozen=True):
    """What a server does before its first fork."""

    sys_path: list[str] | None
    imports: tuple[str, ...]
    hooks: tuple[PrepareHook, ...]


class Fork(msgspec.Struct, frozen=True):
    """Fork one child. With it: the pipe that it dies with, its stderr, and the settings' `shared_fds` in order."""

    number: int
    settings: ChildSettings
    env: dict[str, str]


class Preparing(msgspec.Struct, frozen=True, tag=True):
    """What the server does now."""

    what: str


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Prepared; forks follow requests from now on."""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """Not prepared; the server ends."""

    report: ErrorReport


class Forked(msgspec.Struct, frozen=True, tag=True):
    """The child of a request, with its pidfd."""

    number: int
    pid: int


class Refused(msgspec.Struct, frozen=True, tag=True):
    """A request that got no child."""

    number: int
    reason: str


class Ended(msgspec.Struct, frozen=True, tag=True):
    """A child was reaped; `returncode` as subprocess has it: minus the signal where one ended it."""

    number: int
    returncode: int


Reply = Preparing | Ready | Failed | Forked | Refused | Ended
_requests = msgspec.json.Decoder(Fork)
_replies = msgspec.json.Decoder(Reply)


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Two connected sockets that keep messages apart and carry descriptors."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send(end: socket.socket, message: Fork | Reply, fds: list[int]) -> None:
    """Send one message. Raises: OSError where the other end is gone or the message does not fit."""
    socket.send_fds(end, [msgspec.json.encode(message)], fds)


def receive_request(end: socket.socket) -> tuple[Fork, list[int]] | None:
    """The next request and its descriptors; None where the runtime is gone."""
    data, fds = _receive(end)
    return (_requests.decode(data), fds) if data else None


def receive_reply(end: socket.socket) -> tuple[Reply, list[int]] | None:
    """The next reply and its descriptors; None where the server is gone. Raises: BlockingIOError where there is none."""
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
