"""The sandbox as the event loop sees it: calls that may hang, crash, print or fork, and always come back."""

import asyncio
import itertools
import logging
import os
import socket
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import msgspec

from vla_rl.actors.waits import waiting
from vla_rl.sandbox.limits import ProcessLimits
from vla_rl.sandbox.protocol import (
    Answer,
    Cancel,
    Ended,
    Fault,
    FunctionCall,
    Import,
    ProgramCall,
    Returned,
    Unframer,
    frame,
)
from vla_rl.types import Config

logger = logging.getLogger(__name__)

_READ_BYTES: Final = 1 << 18
_STOP_GRACE_S: Final = 5.0
_INHERITED: Final = ("PATH", "LANG", "LC_ALL", "HOME", "TMPDIR", "VIRTUAL_ENV", "HF_HOME", "LD_LIBRARY_PATH")


class SandboxConfig(Config, frozen=True, kw_only=True):
    """The processes behind text environments."""

    max_calls: int = 16
    """Calls that run at the same time; the next one waits, and its own deadline has not begun."""

    environment: dict[str, str] = msgspec.field(default_factory=dict)
    """Environment variables of the processes, beside PATH, HOME and the like. Nothing else of ours is handed on: keys and
    tokens in this process's environment stay here."""

    def __post_init__(self) -> None:
        self.require(self.max_calls >= 1, "max_calls", ">= 1")


UNSENDABLE: Final = (OverflowError, TypeError, ValueError, RecursionError, msgspec.MsgspecError)
"""What encoding raises: for a whole number beyond 64 bits, an object that is no plain value, text that is no UTF-8."""


class CallResult(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a call."""

    value: Any = None
    """What the function returned: plain values; None where it did not."""

    fault: Fault | None = None
    """None where it ran to its end: a function returned, a program ended with exit code 0."""

    text: str = ""
    """What went wrong, for a person or a model."""

    stdout: str = ""
    stderr: str = ""
    is_offline: bool = False
    """Whether it was cut off from the network."""


class Sandbox:
    """Runs functions and programs in processes of their own, with limits. `async with` starts nothing: the first call does.

    A call never raises for what the function does. The keeper behind it is replaced if it dies; calls that it had then
    are answered with the fault "died". Sandboxed code runs as this process's user: limits and isolation keep accidents in,
    they are no wall against somebody who wants to read this user's files.
    """

    def __init__(self, config: SandboxConfig | None = None) -> None:
        self._config = config if config is not None else SandboxConfig()
        self.counts: Counter[str] = Counter()
        """Calls by how they ended: "done" or a fault."""
        self._numbers = itertools.count()
        self._room = asyncio.Semaphore(self._config.max_calls)
        self._pending: dict[int, asyncio.Future[Ended]] = {}
        self._imported: dict[str, bool] = {}
        """Modules that a keeper was told to import; True where it lived to tell."""
        self._starting = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._is_open = self._has_warned = False

    async def __aenter__(self) -> Self:
        self._is_open = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_open = False
        await self._stop_keeper()

    @property
    def keeper_pid(self) -> int | None:
        """The process that forks; None before the first call."""
        return None if self._process is None else self._process.pid

    async def call(
        self, path: str, arguments: dict[str, Any] | None = None, limits: ProcessLimits | None = None
    ) -> CallResult:
        """Call `module:function` with plain values by name. What it may take and do: `limits`.

        Its module is imported once, where calls are forked from: it should start no threads. A call's time begins after.
        """
        limits = limits if limits is not None else ProcessLimits()
        await self.preload(path.partition(":")[0])
        number = next(self._numbers)
        try:
            message = frame(FunctionCall(number, path, arguments or {}, limits))
        except UNSENDABLE as error:
            return self._counted(CallResult(fault="raised", text=f"its arguments cannot be sent: {error}"))
        ended = await self._answer(number, message)
        result = _result_of(ended)
        if ended.fault is not None:
            return self._counted(result)
        try:
            returned = msgspec.msgpack.decode(ended.returned, type=Returned)
        except (msgspec.MsgspecError, UnicodeError, RecursionError):
            text = "its process ended without an answer"
            return self._counted(msgspec.structs.replace(result, fault="died", text=text))
        if returned.error is not None:
            return self._counted(msgspec.structs.replace(result, fault="raised", text=returned.error))
        return self._counted(msgspec.structs.replace(result, value=returned.value))

    async def run_program(self, source: str, stdin: str = "", limits: ProcessLimits | None = None) -> CallResult:
        """Run Python source in a fresh interpreter and an empty folder; without `limits`, offline."""
        limits = limits if limits is not None else ProcessLimits(network=False)
        number = next(self._numbers)
        try:
            message = frame(ProgramCall(number, source, stdin, limits))
        except UNSENDABLE as error:
            return self._counted(CallResult(fault="raised", text=f"the program cannot be sent: {error}"))
        result = _result_of(await self._answer(number, message))
        if not (limits.network or result.is_offline or result.fault == "died" or self._has_warned):
            self._has_warned = True
            logger.warning("programs are not cut off from the network: this kernel gives no namespaces of their own")
        return self._counted(result)

    async def preload(self, module: str) -> None:
        """Have a module imported where calls are forked from, once; one that kills the keeper is not tried again."""
        await self._ensure_keeper()
        if module not in self._imported:
            self._imported[module] = False
            assert self._writer is not None
            self._writer.write(frame(Import(module)))

    async def _answer(self, number: int, message: bytes) -> Ended:
        with waiting(f"sandboxed call {number}", on="a free place in the sandbox"):
            await self._room.acquire()
        try:
            await self._ensure_keeper()
            future: asyncio.Future[Ended] = asyncio.get_running_loop().create_future()
            self._pending[number] = future
            assert self._writer is not None
            self._writer.write(message)
            try:
                with waiting(f"sandboxed call {number}", on="its process"):
                    return await future
            except asyncio.CancelledError:
                if self._writer is not None and not self._writer.is_closing():
                    self._writer.write(frame(Cancel(number)))
                raise
            finally:
                self._pending.pop(number, None)
        finally:
            self._room.release()

    async def _ensure_keeper(self) -> None:
        if not self._is_open:
            raise RuntimeError("the sandbox is not open; use `async with`.")
        async with self._starting:
            if self._reading is not None and not self._reading.done():
                return
            await self._stop_keeper()
            await self._start_keeper()

    async def _start_keeper(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            environment = {name: os.environ[name] for name in _INHERITED if name in os.environ}
            environment |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", **self._config.environment}
            environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "vla_rl.sandbox.keeper",
                str(theirs.fileno()),
                pass_fds=(theirs.fileno(),),
                stdin=asyncio.subprocess.DEVNULL,
                env=environment,
                start_new_session=True,  # Ctrl-C is ours to handle
            )
        reader, self._writer = await asyncio.open_connection(sock=ours)
        for module in [module for module, is_sound in self._imported.items() if is_sound]:
            self._writer.write(frame(Import(module)))
        self._reading = asyncio.get_running_loop().create_task(self._read(reader), name="reader of the sandbox")

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """Hand out answers until the keeper ends; what it still had then has died."""
        unframer, decoder = Unframer(), msgspec.msgpack.Decoder(Answer)
        try:
            while data := await reader.read(_READ_BYTES):
                for body in unframer.feed(data):
                    self._take(decoder.decode(body))
        except ConnectionError:
            pass  # the same as its end
        finally:
            for number, future in self._pending.items():
                if not future.done():
                    future.set_result(_lost(number))

    def _take(self, answer: Answer) -> None:
        if not isinstance(answer, Ended):
            self._imported[answer.module] = True
            return
        future = self._pending.get(answer.id)
        if future is not None and not future.done():
            future.set_result(answer)

    async def _stop_keeper(self) -> None:
        """Close the socket, on which the keeper kills all and ends; one that does not is killed."""
        if self._process is None:
            return
        process, writer, reading = self._process, self._writer, self._reading
        self._process = self._writer = self._reading = None
        if writer is not None:
            writer.close()
        try:
            async with asyncio.timeout(_STOP_GRACE_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
        finally:
            if reading is not None:
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)

    def _counted(self, result: CallResult) -> CallResult:
        self.counts[result.fault or "done"] += 1
        return result


def function_path(function: Callable[..., Any]) -> str:
    """`module:function`, by which another process finds it. Raises: TypeError for one that no other process can import."""
    module, name = function.__module__, function.__qualname__
    if "<" in name or hasattr(function, "__self__"):
        raise TypeError(
            f"{module}.{name} cannot be found by another process: put the function at the top of a module, or make it "
            "`async def`, which runs in the loop."
        )
    if module == "__main__":
        main = sys.modules["__main__"]
        if main.__spec__ is None and not hasattr(main, "__file__"):
            raise TypeError(
                f"{name} is of an interactive session, which no other process can import; put it in a file."
            )
        module = main.__spec__.name if main.__spec__ is not None else Path(str(main.__file__)).stem
    return f"{module}:{name}"


def _result_of(ended: Ended) -> CallResult:
    return CallResult(
        fault=ended.fault,
        text=ended.words,
        stdout=ended.stdout.decode(errors="replace"),
        stderr=ended.stderr.decode(errors="replace"),
        is_offline=ended.is_offline,
    )


def _lost(number: int) -> Ended:
    words = "the process that keeps it died"
    return Ended(id=number, fault="died", words=words, stdout=b"", stderr=b"", is_offline=False)
