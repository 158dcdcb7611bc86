"""A run and its terminal: signals that stop it in order, output that never fails, reports of errors."""

import asyncio
import contextlib
import errno
import functools
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Coroutine, Iterator
from types import TracebackType
from typing import Any, Final, ParamSpec, Self, TextIO, TypeVar, cast

from vla_rl.errors import CheckpointError, ConfigError, DataError, VlaRlError
from vla_rl.util.error_reports import shorten_traceback
from vla_rl.util.rlimits import explain_thread_limit

T = TypeVar("T")

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopSignal:
    """Listens for signals while its block is open.

    A second SIGINT or SIGTERM ends the process without clean-up. Its children die with it, and the
    memory they share has no name, so nothing is left behind. A second SIGHUP does not end it:
    closing a terminal sends it more than once, and often a SIGTERM after it. A SIGHUP that the
    process ignores, such as under `nohup`, stays ignored. Only the main thread gets signals: in any
    other one, a line says that none is listened to.

    Args:
        then: what stopping in order does, for the printed line.
    """

    def __init__(self, then: str = "saving a checkpoint") -> None:
        self._then, self._asked = then, asyncio.Event()
        self._may_force = False
        self._handled: list[signal.Signals] = []
        self.received: signal.Signals | None = None
        """First signal that asked the run to stop."""

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            _print_error(
                "this run is not in the main thread, so that no signal reaches it: Ctrl-C and "
                f"SIGTERM do not stop it in order; cancel its task to do so ({self._then})"
            )
            return self
        loop = asyncio.get_running_loop()
        # nohup has decided already, and a handler would undo it
        is_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        self._handled = [
            number for number in _SIGNALS if number is not signal.SIGHUP or not is_ignored
        ]
        for number in self._handled:
            loop.add_signal_handler(number, self._received, number)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        loop = asyncio.get_running_loop()
        for number in self._handled:
            loop.remove_signal_handler(number)
        if self.received is signal.SIGHUP:  # further SIGHUPs must not interrupt the last writes
            signal.signal(signal.SIGHUP, signal.SIG_IGN)

    @property
    def exit_status(self) -> int:
        """Exit status for a shell: 128 plus the signal's number; 0 without a signal."""
        return 0 if self.received is None else 128 + self.received

    @property
    def is_asked(self) -> bool:
        """True once the run was asked to stop."""
        return self._asked.is_set()

    def ask_to_stop(self) -> None:
        """Ask the run to stop in order."""
        self._asked.set()

    async def unless_asked(self, work: Coroutine[Any, Any, None]) -> None:
        """Await `work`; cancel it when the run is asked to stop, and wait until it has cleaned up.

        Raises: what `work` raises; CancelledError if the caller itself was cancelled.
        """
        await unless_set(self._asked, work)

    def _received(self, number: signal.Signals) -> None:
        if self._may_force and number is not signal.SIGHUP:
            _print_error(f"{number.name} again: stopping at once")
            os._exit(128 + number)
        is_first, self._may_force = (
            not self.is_asked,
            self._may_force or number is not signal.SIGHUP,
        )
        if not is_first:
            return
        self.received = number
        self.ask_to_stop()  # before printing, because the terminal may be gone
        _print_error(f"{number.name}: stopping in order and {self._then}; once more stops at once")


async def unless_set(event: asyncio.Event, work: Coroutine[Any, Any, None]) -> None:
    """Await `work`; cancel it when `event` is set, and wait until it has cleaned up.

    Raises: what `work` raises; CancelledError if the caller itself was cancelled.
    """
    doing, is_set = asyncio.ensure_future(work), asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait((doing, is_set), return_when=asyncio.FIRST_COMPLETED)
    finally:
        # also if the caller is cancelled: `work` uses what the caller closes next
        is_set.cancel()
        doing.cancel()
        await asyncio.wait((doing, is_set))
    if not doing.cancelled():
        doing.result()


def _print_error(text: str) -> None:
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


_GONE: Final = (errno.EPIPE, errno.EIO, errno.ENXIO, errno.EBADF)
"""Errors of a stream whose reader is gone for good; other errors, such as a full disk, may pass."""


@contextlib.contextmanager
def lasting_output() -> Iterator[None]:
    """While the context is open, drop output that cannot be printed.

    That includes what a stream without a reader still buffers.
    """
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (cast(TextIO, _LastingStream(stream)) for stream in before)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        sys.stdout, sys.stderr = before


class _LastingStream:
    """A text stream whose `write` and `flush` raise neither OSError nor UnicodeEncodeError.

    Everything else is the stream's own.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            self._lost(error)
            return len(text)
        except UnicodeEncodeError as error:
            return self.write(
                text.encode(error.encoding, "backslashreplace").decode(error.encoding)
            )

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._lost(error)

    def _lost(self, error: OSError) -> None:
        """Redirect a stream without a reader to nowhere.

        Its buffer would fail again, at the latest at the process's end.
        """
        if error.errno not in _GONE:
            return
        # a stream of a test or a notebook has no descriptor
        with contextlib.suppress(OSError, ValueError):
            descriptor = self._stream.fileno()
            # the descriptor itself is redirected, because libraries in C write to it too
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, descriptor)
            os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


P = ParamSpec("P")

ENDINGS: Final = (asyncio.CancelledError, KeyboardInterrupt, GeneratorExit, SystemExit)
"""Exceptions that end a task, a program or a generator, and report no mistake."""


def raises_one_error(
    run: Callable[P, Coroutine[Any, Any, T]],
) -> Callable[P, Coroutine[Any, Any, T]]:
    """Decorate a coroutine function so that it raises the error itself, not a group of one.

    Its traceback is short.
    """

    @functools.wraps(run)
    async def reporting(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return await run(*args, **kwargs)
        except ENDINGS:
            raise
        except BaseException as error:
            failure = only_error(error)
            shorten_traceback(failure)
            if words := explain_thread_limit(failure):
                raise ConfigError(words) from failure
            raise failure from failure.__cause__

    return reporting


def only_error(error: BaseException) -> BaseException:
    """Return the single error in a group, also a nested one; the group if its errors differ."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    members = _flatten(error)
    # the same lost engine fails hundreds of episodes at once; a person has to read it once
    if len({(type(member), str(member)) for member in members}) > 1:
        return error
    # what was written onto the group is about the run, such as where its weights were saved
    for note in getattr(error, "__notes__", ()):
        members[0].add_note(note)
    if len(members) > 1:
        others = "1 more task" if len(members) == 2 else f"{len(members) - 1} more tasks"
        members[0].add_note(f"{others} failed in the same way")
    return members[0]


def _flatten(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    found: list[BaseException] = []
    for member in group.exceptions:
        found += _flatten(member) if isinstance(member, BaseExceptionGroup) else [member]
    return found


def explain(error: BaseException) -> str:
    """Describe an error for the person who has to act on it.

    For an error of vla_rl: its message and notes (an environment's own traceback is one of them),
    the lines of user code that led to it, and its cause. For any other error, which is a bug
    somewhere: its traceback, shortened by `vla_rl.util.error_reports`. The errors of a group are described
    one after the other.
    """
    failure = only_error(error)
    shorten_traceback(failure)
    if words := explain_thread_limit(failure):
        return f"error: {words}"
    if isinstance(failure, BaseExceptionGroup):
        members = _flatten(failure)
        return "\n".join([f"{len(members)} errors:", *map(_explain_one, members)])
    return _explain_one(failure)


def _says(error: BaseException, cause: BaseException) -> bool:
    """Return whether the message of an error has that of its cause in it."""
    words = cause.strerror if isinstance(cause, OSError) else str(cause)
    return bool(words) and str(words) in str(error)


def _explain_one(error: BaseException) -> str:
    if not isinstance(error, VlaRlError):
        return "".join(traceback.format_exception(error)).rstrip("\n")
    lines = [f"error: {type(error).__name__}: {error}", *getattr(error, "__notes__", ())]
    if error.__traceback__ is not None:
        lines += ["raised from:", *traceback.format_tb(error.__traceback__)]
    cause = error.__cause__
    # a node's error contains its cause's message
    if isinstance(cause, VlaRlError) and str(cause) in str(error):
        lines += getattr(cause, "__notes__", ())
    elif isinstance(cause, VlaRlError):
        lines.append(_explain_one(cause).replace("error:", "because of", 1))
    elif cause is not None and isinstance(error, CheckpointError | DataError):
        # an error in a file, not in code
        if not _says(error, cause):
            lines.append(f"because of: {type(cause).__name__}: {cause}")
    elif cause is not None:
        lines += ["because of:", *traceback.format_exception(cause)]
    return "\n".join(line.rstrip("\n") for line in lines)
