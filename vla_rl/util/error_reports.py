"""Errors as their readers get them: cut for people, carried from process to process.

The frames of the user's own code are shown, without those of vla_rl around them. The message of a
`VlaRlError`, which vla_rl raises on purpose, tells the user what to do. Any other error without a frame
of the user's code keeps its whole traceback, because it may be a bug in vla_rl. VLA_RL_TRACEBACK=full
keeps every frame of every error, in this process and in those that it starts.

An actor's exception arrives at its caller as its own class if it is built in or one of `vla_rl.errors`;
any other class becomes a `RemoteError`. Either way the remote traceback is attached as a note, so that
it is printed with the error. For an error of ours, whose message is complete, only the traceback of its
cause is attached.
"""

import asyncio
import builtins
import functools
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import msgspec
import numpy as np

import vla_rl.errors
from vla_rl.errors import RemoteError, VlaRlError

VARIABLE: Final = "VLA_RL_TRACEBACK"

_PACKAGE: Final = str(Path(__file__).parents[1]) + os.sep


@functools.cache
def _libraries() -> tuple[str, ...]:
    """Return the folders of installed code: a virtual environment uses a standard library outside of
    it, and has its own packages.
    """
    import sysconfig  # here: with its data it takes 5 ms of every process that starts

    names = ("stdlib", "platstdlib", "purelib", "platlib")
    return tuple(sysconfig.get_path(name) + os.sep for name in names)


def shorten_traceback(error: BaseException) -> None:
    """Cut the tracebacks of an error, of its causes and of the members of a group, in place."""
    if os.environ.get(VARIABLE) == "full":
        return
    seen = set[int]()
    waiting: list[BaseException | None] = [error]
    while waiting:
        each = waiting.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        each.__traceback__ = _shortened(each)
        # the cancellation that ended the other tasks
        if isinstance(each.__context__, asyncio.CancelledError):
            each.__suppress_context__ = True
        waiting += [each.__cause__, None if each.__suppress_context__ else each.__context__]
        if isinstance(each, BaseExceptionGroup):
            waiting += each.exceptions


def format_short(error: BaseException) -> str:
    """Format an error as Python prints it, with its tracebacks cut."""
    shorten_traceback(error)
    return "".join(traceback.format_exception(error))


def _shortened(error: BaseException) -> TracebackType | None:
    """Return the traceback from the first frame of user code on.

    Only the last of vla_rl's frames, which raised it, is left.
    """
    is_deliberate = isinstance(error, VlaRlError)
    frames = _list_frames(error.__traceback__)
    first = next((number for number, frame in enumerate(frames) if _is_user_code(frame)), None)
    if first is None:
        return None if is_deliberate else error.__traceback__
    shown: TracebackType | None = None
    for frame in reversed(frames[first:]):
        if not _filename(frame).startswith(_PACKAGE) or (frame is frames[-1] and not is_deliberate):
            shown = TracebackType(shown, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return shown


def _list_frames(found: TracebackType | None) -> list[TracebackType]:
    frames = []
    while found is not None:
        frames.append(found)
        found = found.tb_next
    return frames


def _is_user_code(frame: TracebackType) -> bool:
    name = _filename(frame)
    is_generated = name.startswith("<frozen ") or (
        name == "<string>" and frame.tb_frame.f_code.co_name == "__init__"
    )
    # compiled code has a file name without its folder, such as uvloop's
    is_compiled = name.endswith(".pyx")
    return not is_generated and not is_compiled and not name.startswith((_PACKAGE, *_libraries()))


def _filename(frame: TracebackType) -> str:
    return frame.tb_frame.f_code.co_filename


_MAX_TRACEBACK = 20_000
_PLAIN = (int, float, bool, bytes, type(None))


class ErrorReport(msgspec.Struct, frozen=True, array_like=True):
    """One exception as plain values, for sending.

    Example:
        ErrorReport(module="builtins", name="ValueError", message="seed is -1, expected >= 0",
                    args=["seed is -1, expected >= 0"], attributes={}, traceback="Traceback (most ...")
    """

    module: str
    name: str
    message: str
    args: list[Any]
    attributes: dict[str, Any]
    traceback: str


def make_report(error: BaseException) -> ErrorReport:
    """Describe an exception by plain values only.

    Never raises, even if the exception's own code does.
    """
    try:
        report = _full_report(error)
        # Tried here, where a failure can still be described: the sender would find it with no
        # caller left to tell.
        msgspec.msgpack.encode(report)
    except Exception as failure:
        name, reason = (
            type(error).__qualname__,
            f"(its report failed with {type(failure).__name__})",
        )
        return ErrorReport("", name, reason, [], {}, reason)
    return report


def _full_report(error: BaseException) -> ErrorReport:
    kind = type(error)
    return ErrorReport(
        module=kind.__module__,
        name=kind.__qualname__,
        message=escape_surrogates(_format_value(str, error)),
        args=[_make_plain(arg) for arg in error.args],
        attributes={
            escape_surrogates(name): _make_plain(value)
            for name, value in vars(error).items()
            if name != "__notes__"
        },
        traceback=escape_surrogates(_format_traceback(error)[-_MAX_TRACEBACK:]),
    )


def restore_error(report: ErrorReport, actor: str, pid: int) -> Exception:
    """Return the exception to raise in the caller.

    Never raises: a report that does not fit its class arrives as a `RemoteError`.
    """
    error = _restore_class(report) or RemoteError(report.name, report.message, report.traceback)
    if report.traceback:
        error.add_note(
            f"Remote traceback of actor {actor!r} (pid {pid}):\n{report.traceback.rstrip()}"
        )
    return error


def _format_traceback(error: BaseException) -> str:
    if not isinstance(error, VlaRlError):
        return format_short(error)
    return format_short(error.__cause__) if error.__cause__ is not None else ""


def _restore_class(report: ErrorReport) -> Exception | None:
    if report.module == "builtins":
        kind = getattr(builtins, report.name, None)
    elif report.module == vla_rl.errors.__name__:
        kind = getattr(vla_rl.errors, report.name, None)
    else:
        return None
    # a future refuses a StopIteration
    if not (isinstance(kind, type) and issubclass(kind, Exception)) or kind is StopIteration:
        return None
    try:
        return _build_error(kind, report)
    except Exception:  # a report is written by another process, and may hold anything
        return None


def _build_error(kind: type[Exception], report: ErrorReport) -> Exception:
    """Build the error, and print it once: what cannot be printed is of no use to the caller."""
    # Constructors of our errors take other arguments than `args`: made without them, and filled
    # from the report.
    error = kind.__new__(kind, *report.args)
    if report.module == "builtins":
        error = kind(*report.args)
    else:
        error.args = tuple(report.args)  # its constructor takes others
    for name, value in report.attributes.items():
        if not name.startswith("__") and not hasattr(BaseException, name):
            setattr(error, name, tuple(value) if isinstance(value, list) else value)
    traceback.format_exception_only(error)
    return error


def _format_value(way: Callable[[Any], str], value: Any) -> str:
    """Return `str` or `repr` of a value.

    If the application's own method raises, return a text that names its error.
    """
    try:
        return way(value)
    except Exception as failure:
        return f"(its __{way.__name__}__ raised {type(failure).__name__})"


def escape_surrogates(text: str) -> str:
    """Return the text if it can be encoded, else with escapes.

    A lone surrogate in a file name cannot be encoded.
    """
    return text.encode(errors="backslashreplace").decode()


def _make_plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, str):
        return escape_surrogates(value)
    # msgpack has 64 bits for a whole number; a longer one arrives as its text.
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        return repr(value)
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, list | tuple):
        return [_make_plain(item) for item in value]
    return escape_surrogates(_format_value(repr, value))
