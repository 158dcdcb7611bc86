"""The keeper of a sandbox: a process without threads that forks for every call and ends what will not end.

    sandbox ──requests──► keeper ──fork──► one child a call, in a session and a folder of its own
            ◄──answers───    └── watches deadlines, output and numbers of processes

It ends, with everything below it, as soon as its socket does: after a `kill -9` of its owner nothing is left.
"""

import contextlib
import importlib
import os
import selectors
import shutil
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Final, NoReturn

import msgspec

from vla_rl.sandbox.child import try_isolation
from vla_rl.sandbox.descendants import become_subreaper, children_of, kill_all_below
from vla_rl.sandbox.protocol import (
    IMPORT_TIMEOUT_S,
    Cancel,
    FunctionCall,
    Imported,
    ProgramCall,
    Request,
    Unframer,
    frame,
)
from vla_rl.sandbox.running import RunningCall

CHECK_EVERY_S: Final = 0.02
"""How often the processes of running calls are counted."""

_ISOLATION_TRIED_AFTER_S: Final = (0.0, 0.05, 0.1, 0.15)
"""A kernel that is out of namespaces for a moment is no kernel that gives none."""


class Keeper:
    """Runs the calls that come through a socket, until it ends.

    Args:
        connection: to its sandbox.
        folder: in which each call gets one of its own.
    """

    def __init__(self, connection: socket.socket, folder: Path) -> None:
        self._connection, self._folder = connection, folder
        self._unframer = Unframer()
        self._decoder = msgspec.msgpack.Decoder(Request)
        self._selector = selectors.DefaultSelector()
        self._selector.register(connection, selectors.EVENT_READ)
        self._calls: dict[int, RunningCall] = {}
        self._can_isolate = _kernel_isolates()

    def run(self) -> None:
        """Serve until the other end is closed; then kill everything."""
        try:
            while True:
                for key, _ in self._selector.select(self._patience()):
                    if key.fileobj is self._connection:
                        data = self._connection.recv(1 << 20)
                        if not data:
                            return
                        for body in self._unframer.feed(data):
                            self._take(self._decoder.decode(body))
                    else:
                        self._on_event(key)
                now = time.monotonic()
                for call in self._calls.values():
                    call.check(now)
        finally:
            for call in list(self._calls.values()):
                call.kill("died", "its sandbox was closed")
                call.ended()
            self._end_strays(set())

    def _patience(self) -> float | None:
        return CHECK_EVERY_S if self._calls else None

    def _take(self, request: Request) -> None:
        if isinstance(request, (FunctionCall, ProgramCall)):
            call = RunningCall(request, self._folder, can_isolate=self._can_isolate)
            self._calls[request.id] = call
            for fd in (*call.pipes, call.pidfd):
                self._selector.register(fd, selectors.EVENT_READ, call)
        elif isinstance(request, Cancel):
            if (running := self._calls.get(request.id)) is not None:
                running.kill("died", "nobody waits for it any more")
        else:
            _import(request.module)
            self._connection.sendall(frame(Imported(request.module)))

    def _on_event(self, key: selectors.SelectorKey) -> None:
        call: RunningCall = key.data
        if key.fd == call.pidfd:
            self._end(call)
        elif key.fd in call.pipes and self._calls.get(call.call.id) is call and not call.read(key.fd):
            self._selector.unregister(key.fd)

    def _end(self, call: RunningCall) -> None:
        del self._calls[call.call.id]
        registered = self._selector.get_map()
        for fd in (*call.pipes, call.pidfd):
            if fd in registered:
                self._selector.unregister(fd)
        self._end_strays({call.pid, *(other.pid for other in self._calls.values())})
        self._connection.sendall(frame(call.ended()))

    def _end_strays(self, known: set[int]) -> None:
        """What a call left behind is a child of ours now, and nobody's call: kill it, and reap it."""
        while strays := [pid for pid in children_of(os.getpid()) if pid not in known]:
            for pid in strays:
                with contextlib.suppress(ProcessLookupError):
                    kill_all_below(pid)
                    os.kill(pid, signal.SIGKILL)
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, 0)


def _import(module: str) -> None:
    """Import a module, if it lets us in time; where it does not, the call that needs it fails with the reason."""
    previous = signal.signal(signal.SIGALRM, _give_up)
    signal.alarm(IMPORT_TIMEOUT_S)
    try:
        importlib.import_module(module)
    except (Exception, SystemExit) as error:
        sys.stderr.write(f"the sandbox cannot import {module!r} ahead of its calls: {type(error).__name__}: {error}\n")
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)
    if (num_threads := len(os.listdir("/proc/self/task"))) > 1:
        sys.stderr.write(
            f"the sandbox has {num_threads} threads since it imported {module!r}, expected 1: a call that needs one of them "
            "will hang until its deadline; start threads in functions, not when a module is imported\n"
        )


def _give_up(number: int, stack: object) -> NoReturn:
    raise TimeoutError(f"it took longer than {IMPORT_TIMEOUT_S} s")


def _kernel_isolates() -> bool:
    """Whether namespaces can be had, tried out in children."""
    for wait_s in _ISOLATION_TRIED_AFTER_S:
        time.sleep(wait_s)
        pid = os.fork()
        if pid == 0:
            os._exit(0 if try_isolation(network=False) else 1)
        if os.waitpid(pid, 0)[1] == 0:
            return True
    return False


def main() -> NoReturn:
    """`python -m vla_rl.sandbox.keeper <fd of its socket> <folder>`; the folder is gone when it ends."""
    become_subreaper()
    folder = Path(sys.argv[2])
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        os.set_inheritable(connection.fileno(), False)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            Keeper(connection, folder).run()
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)  # what was imported has nothing to say at the end


if __name__ == "__main__":
    main()
