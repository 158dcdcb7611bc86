"""A fork server as its runtime sees it, from its launch to its end.

    prepare ──► Ready ──► one request at a time ──► Forked(pid, pidfd) ... Ended(returncode)
       └──► Failed, or too slow, or dead: raised in each waiting spawn; the next one starts another server

The children of a dead server continue: each has its own pipe to us. Their end is still noticed, by
pidfd, but how they ended is then unknown.
"""

import asyncio
import itertools
import logging
import os
import signal
import subprocess
from collections import deque

import msgspec

from vla_rl.actors.placement import ChildProcess, ForkServer
from vla_rl.actors.processes.fork_server import (
    Ended,
    Failed,
    Fork,
    Forked,
    Preparation,
    Preparing,
    Ready,
    Refused,
    Reply,
    receive_reply,
    send_message,
    socket_pair,
)
from vla_rl.actors.processes.liveness import ProcessObserver, Watched
from vla_rl.actors.processes.started_process import (
    ForkedProcess,
    OnExit,
    StderrTail,
    describe_exit_status,
    get_own_sys_path,
    start_interpreter,
)
from vla_rl.actors.wire.envelope import ChildSettings
from vla_rl.errors import ActorDied, ActorFrozen
from vla_rl.util.error_reports import restore_error
from vla_rl.util.processes import is_ready
from vla_rl.util.stalls import STALL_FROM_S

logger = logging.getLogger(__name__)

_ANSWER_WITHIN_S = 30.0
"""A fork takes milliseconds, or tens of them with gigabytes of memory; a server that needs longer
than this is frozen."""

_STOP_WITHIN_S = 5.0


class ForkServerProcess:
    """One server, from its launch to its end.

    Args:
        name: for errors, and as the prefix of its stderr lines.
        placement: `placement.fork_from` is what to prepare.
        observer: watches it.
    """

    def __init__(self, name: str, placement: ChildProcess, observer: ProcessObserver) -> None:
        fork_from = placement.fork_from
        assert fork_from is not None
        self.name = name
        self.is_failed = False
        """Whether it will fork no more."""
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._gone: asyncio.Future[None] = self._loop.create_future()
        self._doing = "its start"
        self._overdue: str | None = None
        self._stopped: str | None = None
        self._numbers = itertools.count()
        self._queue: deque[ForkedProcess] = deque()
        self._asked: ForkedProcess | None = None
        self._num_replies = 0
        self._forked: dict[int, ForkedProcess] = {}
        self._socket, theirs = socket_pair()
        stderr_read, stderr_write = os.pipe()
        try:
            self._process = _start_server(placement, fork_from, theirs.fileno(), stderr_write)
        except BaseException:
            self._socket.close()
            os.close(stderr_read)
            raise
        finally:
            theirs.close()
            os.close(stderr_write)
        self._stderr = StderrTail(stderr_read, name)
        self._pidfd = os.pidfd_open(self.pid)
        self._timer: asyncio.TimerHandle | None = None
        self._start_timer(fork_from.prepare_timeout_s)
        self._socket.setblocking(False)
        self._loop.add_reader(self._pidfd, self._end)
        self._loop.add_reader(self._socket.fileno(), self._on_readable)
        self._observer = observer
        self._watched = self._watch(placement.frozen_after_s)

    @property
    def pid(self) -> int:
        """Process id of the server."""
        return self._process.pid

    def is_alive(self) -> bool:
        """Return whether it may still fork.

        Asks the kernel: our loop may not have noticed its end yet.
        """
        return not self.is_failed and not is_ready(self._pidfd)

    async def until_ready(self) -> None:
        """Wait until it is prepared.

        Raises: a hook's exception; ActorFrozen naming the hook that did not end; ActorDied.
        """
        await asyncio.shield(self._ready)

    def fork_child(
        self, placement: ChildProcess, settings: ChildSettings, stderr: int, on_exit: OnExit
    ) -> "ForkedProcess":
        """Fork a child as soon as the server can. See `StartProcess`."""
        # the server's own, which it got from us
        settings = msgspec.structs.replace(settings, sys_path=None)
        request = Fork(next(self._numbers), settings, placement.env)
        # Copies: the caller closes its own at once, and the request may wait in the queue.
        fds = [os.dup(fd) for fd in (stderr, *settings.shared_fds.values())]
        process = ForkedProcess(self._withdraw, request, fds, on_exit)
        if self.is_failed:
            self._loop.call_soon(process.end_unforked, f"{self.name} is gone", ())
        else:
            self._queue.append(process)
            self._ask_next()
        return process

    def _watch(self, frozen_after_s: float | None) -> Watched | None:
        """Have the server observed.

        It has no thread for a heartbeat: while it owes a reply, its replies count as beats.
        """
        if frozen_after_s is None:
            return None
        watched = Watched(
            pid=lambda: self.pid,
            beat=lambda: self._num_replies,
            owes_beat=lambda: self._asked is not None,
            stopped_after_s=frozen_after_s,
            silent_after_s=frozen_after_s,
            on_frozen=self._on_frozen,
        )
        self._observer.add_process(watched)
        return watched

    def _withdraw(self, process: "ForkedProcess") -> bool:
        """Take a child off the queue; return False if it was requested already."""
        if process not in self._queue:
            return False
        self._queue.remove(process)
        return True

    def close(self) -> None:
        """Have the server end by itself, and kill it if it does not."""
        if not self._gone.done():
            self._stop_asking()
            self._loop.remove_reader(self._socket.fileno())
            self._socket.close()
            self._cancel_timer()
            # It ends by itself at the end of its socket, which lets `atexit` of libraries run.
            self._timer = self._loop.call_later(_STOP_WITHIN_S, self.kill_server)

    async def wait_until_gone(self) -> None:
        """Wait until the process is reaped."""
        await asyncio.shield(self._gone)

    def kill_server(self) -> None:
        """Send SIGKILL."""
        if not self._gone.done():
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def _ask_next(self) -> None:
        """Send the next request.

        Only one at a time: the server can do no more, and its buffer never fills up.
        """
        if self._asked is not None or not self._queue or not self._is_ready or self.is_failed:
            return
        process = self._asked = self._queue.popleft()
        self._start_timer(_ANSWER_WITHIN_S)
        try:
            self._send(process.request, process.fds)
        except Exception as error:  # such as variables that are no text, or too many for a packet
            self._asked = None
            self._cancel_timer()
            # later: its owner may still be making it
            self._loop.call_soon(process.end_unforked, f"not forked: {error}", ())
            self._loop.call_soon(self._ask_next)
            return
        process.close_fds()

    @property
    def _is_ready(self) -> bool:
        return (
            self._ready.done() and not self._ready.cancelled() and self._ready.exception() is None
        )

    def _send(self, message: Fork, fds: list[int]) -> None:
        try:
            send_message(self._socket, message, fds)
        except (BrokenPipeError, ConnectionResetError):
            return  # it has ended, as its pidfd will show

    def _on_readable(self) -> None:
        while self._socket.fileno() >= 0:
            try:
                received = receive_reply(self._socket)
            except BlockingIOError:
                return
            except msgspec.MsgspecError as error:
                self._on_unreadable(str(error))
                return
            if received is None:
                self._loop.remove_reader(self._socket.fileno())
                self._stop_asking()
                return
            self._on_reply(*received)

    def _on_reply(self, reply: Reply, fds: list[int]) -> None:
        self._num_replies += 1
        if isinstance(reply, Preparing):
            self._doing = reply.what
        elif isinstance(reply, Ready):
            self._cancel_timer()
            if not self._ready.done():
                self._ready.set_result(None)
            self._ask_next()
        elif isinstance(reply, Failed):
            self._fail(restore_error(reply.report, self.name, self.pid))
            self.kill_server()
        elif isinstance(reply, Ended):
            forked = self._forked.pop(reply.number, None)
            if forked is not None:
                forked.on_status(reply.returncode)
        else:
            self._on_answer(reply, fds)

    def _on_unreadable(self, problem: str) -> None:
        """Kill a server that sends anything else than its replies; its end fails what waits."""
        self._stopped = f"its reply cannot be read: {problem}"
        self._fail(ActorDied(self.name, self.pid, self._stopped))
        self.kill_server()

    def _on_answer(self, reply: Forked | Refused, fds: list[int]) -> None:
        process = self._asked
        if (
            process is None
            or process.request.number != reply.number
            or len(fds) != isinstance(reply, Forked)
        ):
            for fd in fds:
                os.close(fd)
            self._on_unreadable(f"an answer to request {reply.number}, which was not asked")
            return
        self._asked = None
        self._cancel_timer()
        if isinstance(reply, Refused):
            process.end_unforked(f"not forked: {reply.reason}", ())
        else:
            self._forked[reply.number] = process
            process.on_forked(reply.pid, fds[0])
        self._ask_next()

    def _start_timer(self, seconds: float) -> None:
        self._cancel_timer()
        self._timer = self._loop.call_later(
            seconds, self._on_overdue, seconds, self._loop.time() + seconds
        )

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_overdue(self, seconds: float, due: float) -> None:
        """Kill the server, which took too long.

        Unless our loop stood still, and perhaps the server with it.
        """
        late_s = self._loop.time() - due
        # After a suspended machine the timer fires at once, before the server could run again.
        if late_s >= STALL_FROM_S:
            self._start_timer(min(late_s, seconds))
            return
        self._overdue = f"{self._current_work} did not end within {seconds:g} s; it was killed"
        self.kill_server()

    def _on_frozen(self, what: str) -> None:
        """Kill the server, which does not run at all, even if no request is pending."""
        self._stopped = f"{what} during {self._current_work}, so it was killed"
        self.kill_server()

    @property
    def _current_work(self) -> str:
        if not self._is_ready:
            return self._doing
        return "a fork" if self._asked is not None else "the wait for a request"

    def _stop_asking(self) -> None:
        self.is_failed = True

    def _fail(self, error: Exception) -> None:
        """Fork no more; all waiting spawns raise `error`."""
        self._stop_asking()
        self._cancel_timer()
        if not self._ready.done():
            self._ready.set_exception(error)
            self._ready.exception()  # perhaps no spawn waits

    def _end(self) -> None:
        """Handle the end of the process: fail its requests, and leave its children running."""
        returncode = self._process.wait()
        # The pidfd may be ready before the socket is read: the cause of the end is in there.
        if self._socket.fileno() >= 0:
            self._on_readable()  # its last replies
        expected = self._socket.fileno() < 0
        if not expected:
            self._loop.remove_reader(self._socket.fileno())
            self._socket.close()
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._stderr.close()
        if self._watched is not None:
            self._observer.remove_process(self._watched)
        cause = self._overdue or self._stopped or describe_exit_status(returncode)
        words = self._stderr.lines
        if self._is_ready and not expected:
            logger.warning(
                "%s died: %s; its %d children continue.", self.name, cause, len(self._forked)
            )
        # if it was only stopped, another server may work
        kind = ActorFrozen if self._overdue else ActorDied
        self._fail(kind(self.name, self.pid, cause, words))
        unforked = [*([self._asked] if self._asked is not None else []), *self._queue]
        self._asked = None
        self._queue.clear()
        for process in unforked:
            process.end_unforked(f"not forked: {self.name} died: {cause}", words)
        for process in list(self._forked.values()):
            process.on_server_lost()
        self._forked.clear()
        self._gone.set_result(None)


def _start_server(
    placement: ChildProcess, fork_from: ForkServer, socket_fd: int, stderr: int
) -> "subprocess.Popen[bytes]":
    preparation = Preparation(get_own_sys_path(placement), fork_from.imports, fork_from.prepare)
    # their threads start when NumPy is imported
    one_thread = {"OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    arguments = ["vla_rl.actors.processes.fork_server", str(socket_fd), str(os.getpid())]
    with open(os.memfd_create("vla_rl-preparation", os.MFD_CLOEXEC), "wb") as file:
        file.write(msgspec.json.encode(preparation))
        file.flush()
        file.seek(0)
        own = msgspec.structs.replace(placement, env={**one_thread, **fork_from.env})
        return start_interpreter(own, arguments, stderr, [socket_fd], stdin=file.fileno())
