"""The processes below a sandbox: a call runner that forks for every call, and its parent, the reaper.

    owner ──► reaper ──fork──► call runner ──fork──► one child a call, in a session and a folder of its own
                                 └── watches deadlines, output, numbers of processes, memory and files

The call runner has no threads. It kills calls that exceed their limits, and ends, with all its
descendants, as soon as its socket is closed.

When the call runner or their owner ends, the reaper kills the rest and removes their folder. It only
waits for the two of them, so neither an import nor many calls can delay it. Orphans below it become
its children. If it is stopped when the owner dies, the kernel resumes it (its parent-death signal is
SIGCONT). If it is killed itself, the kernel kills the call runner and all calls; processes that a call
without namespaces started are then left over.
"""

import contextlib
import importlib
import os
import select
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, NoReturn

import msgspec

from vla_rl.sandbox.isolation import find_means
from vla_rl.sandbox.linux import (
    PR_SET_PDEATHSIG,
    become_subreaper,
    get_children,
    kill_descendants,
    prctl,
)
from vla_rl.sandbox.protocol import (
    Cancel,
    FunctionCall,
    Imported,
    Means,
    ProgramCall,
    Ready,
    Request,
    Start,
    Unframer,
    find_exposures,
    frame,
    usable_means,
)
from vla_rl.sandbox.restrictions import keeps_signals_inside
from vla_rl.sandbox.running_call import RunningCall
from vla_rl.util.ownership import remove_tree
from vla_rl.util.processes import die_with_parent_only

IMPORT_TIMEOUT_S: Final = 60
"""Most seconds for one import."""

_LOOK_EVERY_S: Final = 0.1


def import_ahead(module: str, meanwhile: Callable[[], None] | None) -> None:
    """Import a module ahead of its calls.

    If that fails or takes too long, the call that needs it fails with the reason.

    Args:
        module: name of the module.
        meanwhile: called ten times a second, between two instructions of the import; must import
            nothing itself. None: the import is not interrupted until its time is over.
    """
    until = time.monotonic() + IMPORT_TIMEOUT_S

    def look(number: int, stack: object) -> None:
        if meanwhile is not None:
            meanwhile()
        if time.monotonic() > until:
            raise TimeoutError(f"it took longer than {IMPORT_TIMEOUT_S} s")

    # a signal and not a thread: a fork copies one thread alone, so this process may have no other
    previous = signal.signal(signal.SIGALRM, look)
    signal.setitimer(
        signal.ITIMER_REAL, IMPORT_TIMEOUT_S if meanwhile is None else _LOOK_EVERY_S, _LOOK_EVERY_S
    )
    try:
        importlib.import_module(module)
    except (Exception, SystemExit) as error:
        sys.stderr.write(
            f"the sandbox cannot import {module!r} ahead of its calls: "
            f"{type(error).__name__}: {error}\n"
        )
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    if (num_threads := len(os.listdir("/proc/self/task"))) > 1:
        sys.stderr.write(
            f"the sandbox has {num_threads} threads since it imported {module!r}, expected 1: a "
            "call that needs one of them "
            "will hang until its deadline; start threads in functions, not when a module is "
            "imported\n"
        )


CHECK_EVERY_S: Final = 0.02
"""Seconds between two counts of the processes of running calls."""


class CallRunner:
    """Runs the calls that come through a socket, until the socket is closed.

    Args:
        connection: the socket to its sandbox.
        folder: the folder in which each call gets a folder of its own.
        without: means of isolation not to use.
    """

    def __init__(self, connection: socket.socket, folder: Path, without: tuple[Means, ...]) -> None:
        self._connection, self._folder = connection, folder
        self._unframer = Unframer()
        self._decoder = msgspec.msgpack.Decoder(Request)
        self._selector = selectors.DefaultSelector()
        self._selector.register(connection, selectors.EVENT_READ)
        self._calls: dict[int, RunningCall] = {}
        self._wanted = usable_means(is_root=os.geteuid() == 0, without=without)
        self._means: frozenset[Means] = frozenset()

    # waits for                 woken by
    # requests of the owner     the socket, whose end stops everything
    # output of a call          its pipes
    # the end of a call         its pidfd
    # a limit that is passed    the clock, every `CHECK_EVERY_S` while a call runs

    def serve(self) -> None:
        """Test the means of isolation, and serve until the other end is closed.

        Then kill everything.
        """
        self._find_means()
        try:
            while True:
                for key, _ in self._selector.select(self._select_timeout()):
                    if key.fileobj is self._connection:
                        data = self._connection.recv(1 << 20)
                        if not data:
                            return
                        for body in self._unframer.feed(data):
                            self._handle(self._decoder.decode(body))
                    else:
                        self._on_event(key)
                self._check_calls()
        finally:
            # a sandbox that was killed closes its end too, so this covers every way in which it can go
            for call in list(self._calls.values()):
                call.kill_call("died", "its sandbox was closed")
                call.reap()
            self._kill_strays(set())

    def _find_means(self) -> None:
        if "own_user" in self._wanted:
            self._folder.chmod(0o711)  # so that other users can reach their own folders in it
        folder = self._folder / "probe"
        folder.mkdir(mode=0o700)
        self._means, refused = find_means(self._wanted, folder)
        folder.rmdir()
        found = find_exposures(self._means, signals_are_confined=keeps_signals_inside())
        self._connection.sendall(frame(Ready(os.getpid(), found, refused)))

    def _check_calls(self) -> None:
        now = time.monotonic()
        for call in list(self._calls.values()):
            call.enforce_limits(now)

    def _select_timeout(self) -> float | None:
        return CHECK_EVERY_S if self._calls else None

    def _handle(self, request: Request) -> None:
        if isinstance(request, (FunctionCall, ProgramCall)):
            call = RunningCall(request, self._folder, self._means)
            self._calls[request.id] = call
            for fd in (*call.pipes, call.pidfd):
                self._selector.register(fd, selectors.EVENT_READ, call)
        elif isinstance(request, Cancel):
            if (running := self._calls.get(request.id)) is not None:
                running.kill_call("died", "its caller no longer waits for it")
        else:
            import_ahead(request.module, meanwhile=self._check_calls if self._calls else None)
            self._connection.sendall(frame(Imported(request.module)))

    def _on_event(self, key: selectors.SelectorKey) -> None:
        call: RunningCall = key.data
        if key.fd == call.pidfd:
            self._end(call)
        elif (
            key.fd in call.pipes
            and self._calls.get(call.call.id) is call
            and not call.read_output(key.fd)
        ):
            self._selector.unregister(key.fd)

    def _end(self, call: RunningCall) -> None:
        del self._calls[call.call.id]
        registered = self._selector.get_map()
        for fd in (*call.pipes, call.pidfd):
            if fd in registered:
                self._selector.unregister(fd)
        self._kill_strays({call.pid, *(other.pid for other in self._calls.values())})
        self._connection.sendall(frame(call.reap()))

    def _kill_strays(self, known: set[int]) -> None:
        """Kill and reap children that are not calls: processes that a call left behind."""
        # Orphans below a call become children of this process, a subreaper, also after a new
        # session or a double fork.
        while strays := [pid for pid in get_children(os.getpid()) if pid not in known]:
            for pid in strays:
                with contextlib.suppress(ProcessLookupError):
                    kill_descendants(pid)
                    os.kill(pid, signal.SIGKILL)
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, 0)


_SIGNALS_TO_END_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def main() -> NoReturn:
    """Run `python -m vla_rl.sandbox.reaper <Start as JSON>`.

    No process and no file is left when it has ended.
    """
    start = msgspec.json.decode(sys.argv[1], type=Start)
    become_subreaper()
    prctl(PR_SET_PDEATHSIG, signal.SIGCONT)
    with contextlib.suppress(ProcessLookupError):  # the owner is dead already
        owner = os.pidfd_open(start.owner_pid)
        if os.getppid() == start.owner_pid:
            _watch_call_runner(start, owner)
    remove_tree(Path(start.folder))
    os._exit(0)


def _watch_call_runner(start: Start, owner: int) -> None:
    """Fork the call runner, wait for its end or for the owner's, and kill everything that is left."""
    reaper_pid, signals = os.getpid(), os.pipe()
    runner_pid = os.fork()
    if runner_pid == 0:
        die_with_parent_only(reaper_pid)
        for fd in (owner, start.folder_lock, *signals):
            os.close(fd)
        run_call_runner(start)
    os.close(start.connection)  # the owner learns from its end that the call runner is gone
    # Python runs handlers between two instructions, but `select` would wait on: the pipe ends it
    os.set_blocking(signals[1], False)
    signal.set_wakeup_fd(signals[1])
    for number in _SIGNALS_TO_END_ON:
        signal.signal(number, lambda *_: None)
    # three ways to end, one wait: the owner dies, the call runner dies, or somebody asks this process to
    select.select([owner, os.pidfd_open(runner_pid), signals[0]], [], [])
    kill_descendants(reaper_pid)


def run_call_runner(start: Start) -> NoReturn:
    """Run the call runner until its socket is closed."""
    try:
        become_subreaper()
        with socket.socket(fileno=start.connection) as connection:
            os.set_inheritable(connection.fileno(), False)
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                CallRunner(connection, Path(start.folder), start.without).serve()
        os._exit(0)  # without exit handlers of imported modules
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:  # no exception may return into the reaper's own code
        os._exit(1)


if __name__ == "__main__":
    main()
