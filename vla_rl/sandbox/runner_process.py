"""The event loop's side of one call runner: requests, pending answers, a clean shutdown.

The shutdown leaves nothing behind.
"""

import asyncio
import contextlib
import logging
import math
import os
import socket
import subprocess
from collections.abc import Callable, Mapping
from typing import Final, Self

import msgspec

from vla_rl.actors.placement import ChildProcess
from vla_rl.actors.processes.liveness import ProcessObserver, Watched
from vla_rl.actors.processes.started_process import InterpreterProcess
from vla_rl.sandbox.linux import kill_tree
from vla_rl.sandbox.protocol import (
    Answer,
    Cancel,
    Ended,
    Import,
    Imported,
    Means,
    Ready,
    Start,
    Unframer,
    frame,
)
from vla_rl.sandbox.reaper import IMPORT_TIMEOUT_S
from vla_rl.util.ownership import OwnedFolder, remove_abandoned_folders
from vla_rl.util.stalls import waiting

logger = logging.getLogger(__name__)

_FOLDERS: Final = "vla_rl_sandbox."
_READ_BYTES: Final = 1 << 18
_STOP_GRACE_S: Final = 5.0
_LAST_LOOK_S: Final = 1.0
"""Seconds to read an answer that arrived before its deadline while this loop was busy."""
STOPPED_AFTER_S: Final = 2.0
"""Seconds after which a call runner that a signal has stopped counts as stuck."""


class CallRunnerProcess:
    """A call runner and its reaper from their start to their end; `start_runner` starts them.

    The call runner ends every call by the call's own limits. If an answer takes longer, or a signal
    stops the call runner, it is stuck: it is killed with all its calls, and every caller gets an answer
    with the fault "died".

    Invariant: when `stop` has returned, the two processes, all that they started, and their folder
    are gone. If this process is killed, or another one kills the call runner, the reaper ensures that.
    """

    def __init__(
        self,
        process: InterpreterProcess,
        gone: asyncio.Event,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        folder: OwnedFolder,
        imported: dict[str, bool],
        on_ready: Callable[[Ready], None],
        observer: ProcessObserver,
    ) -> None:
        self._process, self._gone, self._writer = process, gone, writer
        self._folder, self._imported = folder, imported
        self._on_ready, self._observer = on_ready, observer
        self.pid: int | None = None
        """Pid of the process that forks; None until it is ready."""
        self._pending: dict[int, asyncio.Future[Ended]] = {}
        self._num_imports = self._num_imports_over = 0
        self._is_stuck = False
        self._ending: asyncio.Task[None] | None = None
        loop = asyncio.get_running_loop()
        self._reading = loop.create_task(self._read(reader), name="reader of the sandbox")
        # the reaper too: while it stands still, nothing would end with the call runner
        self._watched = [self._watch(lambda: process.pid), self._watch(lambda: self.pid or 0)]
        for module in [module for module, survived in imported.items() if survived]:
            self._import(module)

    @classmethod
    async def start_runner(
        cls,
        environment: Mapping[str, str],
        imported: dict[str, bool],
        without: tuple[Means, ...],
        on_ready: Callable[[Ready], None],
        observer: ProcessObserver,
    ) -> Self:
        """Start a process.

        Args:
            environment: environment variables of the process and its calls.
            imported: modules that a call runner imported, and whether it survived the import; updated
                here. The ones that it survived are imported again.
            without: means of isolation not to use.
            on_ready: called when the call runner accepts calls, with the result of its tests of this
                kernel.
            observer: notices that a signal has stopped it.
        """
        # what sandboxes of killed programs left: their own reaper may have been killed with them
        await asyncio.to_thread(remove_abandoned_folders, _FOLDERS)
        folder = OwnedFolder(_FOLDERS)
        ours, theirs = socket.socketpair()
        gone = asyncio.Event()
        try:
            with theirs:
                start = Start(
                    theirs.fileno(), str(folder.path), folder.descriptor, os.getpid(), without
                )
                # A fresh interpreter and no fork of a fork server: a fork shows the variables of the
                # server's start in /proc/PID/environ, where a call could read our keys and tokens;
                # and its parent would be the server, so that no death of ours could wake it.
                process = InterpreterProcess(
                    ChildProcess(),
                    ["vla_rl.sandbox.reaper", msgspec.json.encode(start).decode()],
                    lambda *_: gone.set(),
                    stderr=None,
                    pass_fds=(theirs.fileno(), folder.descriptor),
                    stdin=subprocess.DEVNULL,
                    env=environment,
                )
            reader, writer = await asyncio.open_connection(sock=ours)
        except BaseException:
            ours.close()  # a call runner that was started ends then
            folder.remove_folder()
            raise
        return cls(process, gone, reader, writer, folder, imported, on_ready, observer)

    @property
    def is_serving(self) -> bool:
        """Whether it accepts calls: False when it has ended or is stuck."""
        return not self._is_stuck and not self._reading.done()

    def preload(self, module: str) -> None:
        """Import a module in the call runner before the next fork, unless that was tried before."""
        if module not in self._imported:
            # until it has survived the import: the next call runner must not import what killed this one
            self._imported[module] = False
            self._import(module)

    async def answer(self, number: int, message: bytes, allowed_s: float) -> Ended:
        """Run a call, and return how it ended. Cancelling this kills the call.

        Args:
            number: number of the call.
            message: the framed call.
            allowed_s: seconds allowed from now on; the time of imports, which delay all calls, is
                added.
        """
        future: asyncio.Future[Ended] = asyncio.get_running_loop().create_future()
        self._pending[number] = future
        self._writer.write(message)
        try:
            with waiting(f"sandboxed call {number}", on="its process"):
                if not await self._wait_in_time(future, allowed_s):
                    self._end_stuck(f"did not answer within {allowed_s:g} s")
                    await self.stop()
                return future.result()
        except asyncio.CancelledError:
            if not self._writer.is_closing():
                self._writer.write(frame(Cancel(number)))
            raise
        finally:
            del self._pending[number]

    async def stop(self) -> None:
        """Close the socket, so that the call runner kills all calls and ends.

        A call runner that is stuck or does not end is killed.

        If this is cancelled, the shutdown continues, and the next `stop` waits for it.
        """
        await asyncio.shield(self._begin_end())

    def _begin_end(self) -> "asyncio.Task[None]":
        if self._ending is None:
            for watched in self._watched:
                self._observer.remove_process(watched)
            self._ending = asyncio.get_running_loop().create_task(
                self._end(), name="end of a sandbox's call runner"
            )
        return self._ending

    async def _end(self) -> None:
        self._writer.close()
        try:
            if not self._is_stuck:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_STOP_GRACE_S):
                        await self._gone.wait()
            if not self._gone.is_set():
                # In a thread: processes that go on forking take several rounds to kill, for up to
                # 10 s.
                await asyncio.to_thread(kill_tree, self._process.pid)
                await self._gone.wait()
        finally:
            self._process.kill()  # if the loop itself is ending; its calls die with it
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
            await asyncio.to_thread(self._folder.remove_folder)

    def _import(self, module: str) -> None:
        self._num_imports += 1
        self._writer.write(frame(Import(module)))

    async def _wait_in_time(self, future: asyncio.Future[Ended], allowed_s: float) -> bool:
        clock = asyncio.get_running_loop().time
        began, num_over = clock(), self._num_imports_over
        # the call runner does one thing at a time: an import for another caller delays this call too
        while not future.done():
            num_imports = self._num_imports
            left_s = began + allowed_s + IMPORT_TIMEOUT_S * (num_imports - num_over) - clock()
            is_last = left_s <= 0.0
            await asyncio.wait({future}, timeout=_LAST_LOOK_S if is_last else left_s)
            if is_last and self._num_imports == num_imports:
                break
        return future.done()

    def _end_stuck(self, words: str) -> None:
        logger.error(
            "the call runner of a sandbox (pid %s) %s; it is killed, with the %d calls that it runs.",
            self.pid,
            words,
            len(self._pending),
        )
        self._is_stuck = True
        self._fail_pending(f"the process that runs it {words} and was killed")
        self._begin_end()

    def _watch(self, pid: Callable[[], int]) -> Watched:
        """Have a process observed. It has no thread for a heartbeat: only a stop counts."""
        watched = Watched(
            pid=pid,
            beat=lambda: 0,
            owes_beat=lambda: False,
            stopped_after_s=STOPPED_AFTER_S,
            silent_after_s=math.inf,
            on_frozen=lambda _: self._end_stuck("was stopped by a signal for some 2 s"),
        )
        self._observer.add_process(watched)
        return watched

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """Deliver answers until the call runner ends; calls without an answer by then have died."""
        unframer, decoder = Unframer(), msgspec.msgpack.Decoder(Answer)
        try:
            while data := await reader.read(_READ_BYTES):
                for body in unframer.feed(data):
                    self._handle(decoder.decode(body))
        except ConnectionError:
            pass  # the same as its end
        finally:
            self._fail_pending("the process that runs it died")

    def _handle(self, answer: Answer) -> None:
        if isinstance(answer, Ready):
            self.pid = answer.pid
            self._on_ready(answer)
            return
        if isinstance(answer, Imported):
            self._imported[answer.module] = True
            self._num_imports_over += 1
            return
        future = self._pending.get(answer.id)
        if future is not None and not future.done():
            future.set_result(answer)

    def _fail_pending(self, words: str) -> None:
        for number, future in self._pending.items():
            if not future.done():
                lost = Ended(
                    id=number, fault="died", words=words, stdout=b"", stderr=b"", is_offline=False
                )
                future.set_result(lost)
