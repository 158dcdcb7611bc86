"""The program of a fork server: `python -m vla_rl.actors.processes.fork_server FD PARENT_PID`.

Only a runtime starts it. It prepares as requested, then forks a child for each request, whose end it
reports. It must remain a process that can be forked: one thread, no event loop, no ZeroMQ context, no
OpenGL. So it waits in poll(); it imports the children's modules but never runs them. A fork copies only
page tables: prepared memory is shared until a process writes to it.

Its messages use a private socket pair that closes with either end. One message is one packet: a struct
as JSON, with the file descriptors that belong to it. The preparation is not a message, because it may be
large: it is in the file that is the server's stdin.
"""

import gc
import importlib
import os
import pkgutil
import random
import select
import socket
import sys

import msgspec

from vla_rl.actors.placement import PrepareHook
from vla_rl.actors.processes.child import end_process, flush_output, run_child
from vla_rl.actors.wire.envelope import ChildSettings
from vla_rl.util.error_reports import ErrorReport, make_report
from vla_rl.util.processes import (
    die_with_parent_only,
    die_with_pipe,
    leave_terminal_to_parent,
    name_process,
    refuse_threads,
)

_MAX_BYTES = 1 << 18
_MAX_FDS = 5


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


def send_message(end: socket.socket, message: Fork | Reply, fds: list[int]) -> None:
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


_PROCESS_NAME = "vla_rl-forks"


def main() -> None:
    """Serve the runtime at the other end of the socket; in a forked child, become its actor."""
    leave_terminal_to_parent()
    die_with_parent_only(int(sys.argv[2]))
    name_process(_PROCESS_NAME)
    server = ForkServerLoop(socket.socket(fileno=int(sys.argv[1])))
    if not server.run_preparation(_read_preparation()):
        os._exit(1)  # a failed step may have left a thread that a normal exit would wait for
    settings = server.serve_requests()
    if settings is not None:
        run_child(settings)
    end_process(0)


class ForkServerLoop:
    """The server: `run_preparation`, then `serve_requests`. Owns `runtime`, the socket to it."""

    def __init__(self, runtime: socket.socket) -> None:
        self._runtime = runtime
        self._children: dict[int, int] = {}  # number of the request, by pidfd

    def run_preparation(self, preparation: Preparation) -> bool:
        """Import the modules and call the hooks.

        Return False if that failed, after reporting it to the runtime.
        """
        # Children import what the runtime can, whatever it has added to its path.
        if preparation.sys_path is not None:
            sys.path[:] = preparation.sys_path
        try:
            for module in preparation.imports:
                self._reply(Preparing(f"import of {module}"))
                importlib.import_module(module)
                refuse_threads(f"importing {module}")
            for hook in preparation.hooks:
                self._reply(Preparing(hook.function))
                _call_hook(hook)
                refuse_threads(hook.function)
        except Exception as error:  # raised again by `spawn`
            flush_output()  # the runtime kills this process when it reads the report
            self._reply(Failed(make_report(error)))
            return False
        gc.collect()
        gc.freeze()  # the collector would write to each object, and so copy the shared pages
        self._reply(Ready())
        return True

    def serve_requests(self) -> ChildSettings | None:
        """Fork a child per request until the runtime has ended, then return None.

        In a child return its settings.
        """
        waiting = select.poll()
        waiting.register(self._runtime, select.POLLIN)
        while True:
            for fd, _ in waiting.poll():
                if fd != self._runtime.fileno():
                    waiting.unregister(fd)
                    self._reap(fd)
                    continue
                received = receive_request(self._runtime)
                if received is None:
                    return None
                request, fds = received
                pidfd = self._fork(request, fds)
                if pidfd is None:
                    return _set_up_child(request, fds)
                if pidfd >= 0:
                    waiting.register(pidfd, select.POLLIN)

    def _fork(self, request: Fork, fds: list[int]) -> int | None:
        """Fork; return the child's pidfd, or -1 if there is none.

        In the child itself return None.
        """
        try:
            refuse_threads("something after it was prepared")
            pid = os.fork()
        except (OSError, RuntimeError) as error:
            _close_all(fds)
            self._reply(Refused(request.number, str(error)))
            return -1
        if pid == 0:
            # with these a child would keep its siblings and the server from being seen as ended
            self._runtime.close()
            _close_all(list(self._children))
            return None
        _close_all(fds)
        pidfd = os.pidfd_open(pid)
        self._children[pidfd] = request.number
        self._reply(Forked(request.number, pid), [pidfd])
        return pidfd

    def _reap(self, pidfd: int) -> None:
        result = os.waitid(os.P_PIDFD, pidfd, os.WEXITED)
        os.close(pidfd)
        number = self._children.pop(pidfd)
        if result is not None:
            returncode = result.si_status if result.si_code == os.CLD_EXITED else -result.si_status
            self._reply(Ended(number, returncode))

    def _reply(self, reply: Reply, fds: list[int] | None = None) -> None:
        try:
            send_message(self._runtime, reply, fds or [])
        except (BrokenPipeError, ConnectionResetError):
            sys.exit(0)  # the runtime is gone


def _read_preparation() -> Preparation:
    """Read the preparation from stdin, which is empty afterwards."""
    with open(0, "rb", closefd=False) as file:
        preparation = msgspec.json.decode(file.read(), type=Preparation)
    with open(os.devnull, "rb") as null:
        os.dup2(null.fileno(), 0)
    return preparation


def _call_hook(hook: PrepareHook) -> None:
    found = pkgutil.resolve_name(hook.function)
    if not callable(found):
        raise TypeError(f"the prepare hook {hook.function} is not a function.")
    found(**hook.kwargs)


def _set_up_child(request: Fork, fds: list[int]) -> ChildSettings:
    """Set up a child's own lifeline, stderr, memory, environment and random numbers."""
    lifeline, stderr, *shared = fds
    die_with_pipe(lifeline)
    os.dup2(stderr, 2)
    os.close(stderr)
    os.environ.update(request.env)
    random.seed()
    # a child that imports it later draws a seed then
    if (numpy_random := sys.modules.get("numpy.random")) is not None:
        numpy_random.seed(int.from_bytes(os.urandom(4), "little"))
    return msgspec.structs.replace(
        request.settings, **dict(zip(request.settings.shared_fds, shared, strict=True))
    )


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


if __name__ == "__main__":
    main()
