"""The keeper of a sandbox: a process without threads that forks for every call.

It kills calls that exceed their limits.

    sandbox ──requests──► keeper ──fork──► one child a call, in a session and a folder of its own
            ◄──answers───    └── watches deadlines, output, numbers of processes, memory and files

It ends, with all its descendants, as soon as its socket is closed. Its reaper does this if the
keeper cannot.
"""

import contextlib
import os
import selectors
import signal
import socket
import time
from pathlib import Path
from typing import Final

import msgspec

from vla_rl.sandbox.descendants import children_of, kill_all_below
from vla_rl.sandbox.isolation import find_means
from vla_rl.sandbox.landlock import keeps_signals_inside
from vla_rl.sandbox.means import Means, open_to_calls, usable_means
from vla_rl.sandbox.preloading import import_ahead
from vla_rl.sandbox.protocol import (
    Cancel,
    FunctionCall,
    Imported,
    ProgramCall,
    Ready,
    Request,
    Unframer,
    frame,
)
from vla_rl.sandbox.running import RunningCall

CHECK_EVERY_S: Final = 0.02
"""Seconds between two counts of the processes of running calls."""


class Keeper:
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

    def run(self) -> None:
        """Test the means of isolation, and serve until the other end is closed.

        Then kill everything.
        """
        self._find_means()
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
                self._check_calls()
        finally:
            for call in list(self._calls.values()):
                call.kill("died", "its sandbox was closed")
                call.ended()
            self._end_strays(set())

    def _find_means(self) -> None:
        if "own_user" in self._wanted:
            self._folder.chmod(0o711)  # so that other users can reach their own folders in it
        folder = self._folder / "trial"
        folder.mkdir(mode=0o700)
        self._means, refused = find_means(self._wanted, folder)
        folder.rmdir()
        found = open_to_calls(self._means, signals_are_confined=keeps_signals_inside())
        self._connection.sendall(frame(Ready(os.getpid(), found, refused)))

    def _check_calls(self) -> None:
        now = time.monotonic()
        for call in list(self._calls.values()):
            call.check(now)

    def _patience(self) -> float | None:
        return CHECK_EVERY_S if self._calls else None

    def _take(self, request: Request) -> None:
        if isinstance(request, (FunctionCall, ProgramCall)):
            call = RunningCall(request, self._folder, self._means)
            self._calls[request.id] = call
            for fd in (*call.pipes, call.pidfd):
                self._selector.register(fd, selectors.EVENT_READ, call)
        elif isinstance(request, Cancel):
            if (running := self._calls.get(request.id)) is not None:
                running.kill("died", "its caller no longer waits for it")
        else:
            import_ahead(request.module, meanwhile=self._check_calls if self._calls else None)
            self._connection.sendall(frame(Imported(request.module)))

    def _on_event(self, key: selectors.SelectorKey) -> None:
        call: RunningCall = key.data
        if key.fd == call.pidfd:
            self._end(call)
        elif (
            key.fd in call.pipes and self._calls.get(call.call.id) is call and not call.read(key.fd)
        ):
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
        """Kill and reap children that are not calls: processes that a call left behind."""
        while strays := [pid for pid in children_of(os.getpid()) if pid not in known]:
            for pid in strays:
                with contextlib.suppress(ProcessLookupError):
                    kill_all_below(pid)
                    os.kill(pid, signal.SIGKILL)
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, 0)
