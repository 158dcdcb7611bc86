"""The event loop's side of the sandbox: calls always return.

They may hang, crash, print or fork.
"""

import asyncio
import itertools
import logging
import os
import sys
from collections import Counter
from collections.abc import Callable
from types import MappingProxyType, TracebackType
from typing import Any, Final, Self

import msgspec

from vla_rl.actors.processes.liveness import ProcessObserver
from vla_rl.sandbox.protocol import (
    ALL_MEANS,
    Ended,
    Fault,
    FunctionCall,
    Means,
    ProcessLimits,
    ProgramCall,
    Ready,
    Returned,
    describe_missing,
    frame,
)
from vla_rl.sandbox.runner_process import CallRunnerProcess
from vla_rl.types import Config, PositiveFloat, PositiveInt
from vla_rl.util.imports import import_path
from vla_rl.util.processes import inherited_environment
from vla_rl.util.stalls import waiting

logger = logging.getLogger(__name__)

_INHERITED: Final = (
    "PATH",
    "LANG",
    "LC_ALL",
    "HOME",
    "TMPDIR",
    "VIRTUAL_ENV",
    "HF_HOME",
    "LD_LIBRARY_PATH",
)


class SandboxConfig(Config, frozen=True, kw_only=True):
    """The processes that run the tools and scorers of text environments."""

    FORMER_NAMES = MappingProxyType({"keeper_grace_s": "runner_grace_s"})

    max_calls: PositiveInt = 16
    """Most calls that run at the same time. Further calls wait; their own time limit has not
    started then."""

    environment: dict[str, str] = msgspec.field(default_factory=dict)
    """Environment variables of the processes, besides PATH, HOME and the like. No others are
    inherited, so that keys and tokens in this process's environment stay private."""

    runner_grace_s: PositiveFloat = 30.0
    """Most seconds after a call's own `timeout_s` in which the call runner has to report its end. A
    call runner that takes longer is stuck: it is killed with all its calls, and the next call
    starts another."""

    without: tuple[Means, ...] = ()
    """Means of isolation not to use: namespaces, mounts, own_user, landlock, seccomp. By default
    all that the kernel supports are used. Exclude mounts, own_user and landlock if tools have to
    write outside of their folders."""

    def __post_init__(self) -> None:
        self.require(
            ALL_MEANS.issuperset(self.without), "without", f"only {', '.join(sorted(ALL_MEANS))}"
        )


RETRIES_AFTER_S: Final = (0.1, 0.2, 0.4, 0.8)
"""Seconds before each retry of a call that did not run because the kernel could not isolate it: it
may be out of namespaces for a moment."""

UNSENDABLE: Final = (OverflowError, TypeError, ValueError, RecursionError, msgspec.MsgspecError)
"""Errors of encoding: an integer beyond 64 bits, an object that is not a plain value, text that is
not valid UTF-8."""


class CallResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a call.

    Example:
        CallResult(value=5, stdout="computed\n", duration_s=0.013)
        CallResult(fault="timed_out", text="it took longer than 10 s and was stopped", duration_s=10.02)
    """

    value: Any = None
    """The function's result, as plain values; None if it did not return."""

    fault: Fault | None = None
    """The fault of the call; None if a function returned, or a program ended with exit code 0."""

    text: str = ""
    """The reason of the fault, for a person or a model."""

    stdout: str = ""
    stderr: str = ""
    is_offline: bool = False
    """Whether the call had no network."""

    duration_s: float = 0.0
    """Seconds from its start to its end, without the wait for a free slot."""


class Sandbox:
    """Runs functions and programs in processes of their own, with limits.

    `async with` starts nothing: the first call does.

    A call never raises an error of its function. A call runner that dies or is stuck is replaced; its
    calls are answered with the fault "died". A call writes only in a folder of its own, and can
    read all that this user can read; actions that this kernel and user cannot prevent are logged
    once.
    """

    def __init__(self, config: SandboxConfig | None = None) -> None:
        self._config = config if config is not None else SandboxConfig()
        self.counts: Counter[str] = Counter()
        """Number of calls by their end: "done" or a fault."""
        self._numbers = itertools.count()
        self._slots = asyncio.Semaphore(self._config.max_calls)
        self._imported: dict[str, bool] = {}
        """Modules that a call runner imported, and whether it survived the import."""
        self._starting = asyncio.Lock()
        self._runner: CallRunnerProcess | None = None
        self.missing: dict[Means, str] = {}
        """Means of isolation that calls run without, each with the reason; known when the first
        call has ended."""
        self._observer: ProcessObserver | None = None
        """There while it is open."""

    async def __aenter__(self) -> Self:
        self._observer = ProcessObserver("a sandbox")
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        observer, self._observer = self._observer, None
        async with self._starting:
            runner, self._runner = self._runner, None
            try:
                if runner is not None:
                    await runner.stop()
            finally:
                if observer is not None:
                    observer.close()

    @property
    def runner_pid(self) -> int | None:
        """Pid of the process that forks; None until a first call has started one."""
        return None if self._runner is None else self._runner.pid

    async def call(
        self,
        path: str,
        arguments: dict[str, Any] | None = None,
        limits: ProcessLimits | None = None,
        *,
        is_converted: bool = False,
    ) -> CallResult:
        """Call `module:function` with plain values by name, within `limits`.

        With `is_converted` the arguments are converted to the type hints, such as a dict to a
        struct.

        The module is imported once, in the call runner, and should start no threads. A call's time
        starts after the import.
        """
        limits = limits if limits is not None else ProcessLimits()
        await self.preload(path.partition(":")[0])
        number = next(self._numbers)
        try:
            message = frame(FunctionCall(number, path, arguments or {}, limits, is_converted))
        except UNSENDABLE as error:
            return self._count_result(
                CallResult(fault="raised", text=f"its arguments cannot be sent: {error}")
            )
        ended = await self._answer(number, message, limits)
        result = _make_result(ended)
        if ended.fault is not None:
            return self._count_result(result)
        try:
            returned = msgspec.msgpack.decode(ended.returned, type=Returned)
        except (msgspec.MsgspecError, UnicodeError, RecursionError):
            text = "its process ended without an answer"
            return self._count_result(msgspec.structs.replace(result, fault="died", text=text))
        if returned.error is not None:
            return self._count_result(
                msgspec.structs.replace(result, fault="raised", text=returned.error)
            )
        return self._count_result(msgspec.structs.replace(result, value=returned.value))

    async def run_program(
        self, source: str, stdin: str = "", limits: ProcessLimits | None = None
    ) -> CallResult:
        """Run Python source in a new interpreter and an empty folder; without `limits`, offline."""
        limits = limits if limits is not None else ProcessLimits(network=False)
        number = next(self._numbers)
        try:
            message = frame(ProgramCall(number, source, stdin, limits))
        except UNSENDABLE as error:
            return self._count_result(
                CallResult(fault="raised", text=f"the program cannot be sent: {error}")
            )
        return self._count_result(_make_result(await self._answer(number, message, limits)))

    async def preload(self, module: str) -> None:
        """Import a module in the call runner, once.

        A module that kills the call runner is not tried again.
        """
        (await self._get_runner()).preload(module)

    async def _answer(self, number: int, message: bytes, limits: ProcessLimits) -> Ended:
        with waiting(f"sandboxed call {number}", on="a free slot of the sandbox"):
            await self._slots.acquire()
        try:
            ended = await self._ask_runner(number, message, limits)
            for wait_s in RETRIES_AFTER_S:
                if ended.fault != "not_isolated":
                    break
                await asyncio.sleep(wait_s)
                ended = await self._ask_runner(number, message, limits)
            return ended
        finally:
            self._slots.release()

    async def _ask_runner(self, number: int, message: bytes, limits: ProcessLimits) -> Ended:
        runner = await self._get_runner()
        return await runner.answer(number, message, limits.timeout_s + self._config.runner_grace_s)

    async def _get_runner(self) -> CallRunnerProcess:
        """Return the call runner, or start another. Raises: RuntimeError if the sandbox is not open."""
        # Two first calls at once would start two call runners, of which one would be forgotten.
        async with self._starting:
            if self._observer is None:
                raise RuntimeError("the sandbox is not open; use `async with`.")
            if self._runner is None or not self._runner.is_serving:
                if self._runner is not None:
                    await self._runner.stop()
                self._runner = await CallRunnerProcess.start_runner(
                    self._environment(),
                    self._imported,
                    self._config.without,
                    self._describe,
                    self._observer,
                )
            return self._runner

    def _describe(self, ready: Ready) -> None:
        """Log what calls are not prevented from, unless an earlier call runner has logged it."""
        # One line for all call runners of a sandbox, and another one only if the next finds other
        # means.
        missing = {
            **dict.fromkeys(self._config.without, "left out by configuration"),
            **ready.refused,
        }
        if missing != self.missing:
            self.missing = missing
            level = logging.WARNING if ready.open_to_calls else logging.INFO
            logger.log(level, "%s", describe_missing(missing, ready.open_to_calls))

    def _environment(self) -> dict[str, str]:
        inherited = inherited_environment()
        # tokens and keys of the run's environment are no business of code that a model wrote
        ours: dict[str, str] = {name: inherited[name] for name in _INHERITED if name in inherited}
        # with -P an interpreter does not look in its folder by itself: "" would be lost
        search = os.pathsep.join(map(os.path.abspath, sys.path))
        # calls are forked from the call runner: threads that an import starts there would be missing in them
        one_thread = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        return {**ours, **one_thread, **self._config.environment, "PYTHONPATH": search}

    def _count_result(self, result: CallResult) -> CallResult:
        self.counts[result.fault or "done"] += 1
        return result


def function_path(function: Callable[..., Any]) -> str:
    """Return `module:function`, for another process to import.

    Raises: TypeError if no other process can import it.
    """
    try:
        return import_path(function)
    except TypeError as error:
        raise TypeError(f"{error}, or make it `async def`, which runs in the loop.") from None


def _make_result(ended: Ended) -> CallResult:
    return CallResult(
        fault=ended.fault,
        text=ended.words,
        stdout=ended.stdout.decode(errors="replace"),
        stderr=ended.stderr.decode(errors="replace"),
        is_offline=ended.is_offline,
        duration_s=ended.duration_s,
    )
