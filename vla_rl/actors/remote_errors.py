"""Carry an exception from the actor that raised it to the caller that awaits it.

Built-in exceptions and those of `vla_rl.errors` arrive as their own class; any other class becomes
a `RemoteError`. Either way the remote traceback is attached as a note, so that it is printed with
the error. For an error of ours, whose message is complete, only the traceback of its cause is
attached.
"""

import builtins
import traceback
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

import vla_rl.errors
from vla_rl.errors import RemoteError, VlaRlError
from vla_rl.util.tracebacks import format_short

_MAX_TRACEBACK = 20_000
_PLAIN = (int, float, bool, bytes, type(None))


class ErrorReport(msgspec.Struct, frozen=True, array_like=True):
    """One exception as plain values, for sending."""

    module: str
    name: str
    message: str
    args: list[Any]
    attributes: dict[str, Any]
    traceback: str


def report_of(error: BaseException) -> ErrorReport:
    """Describe an exception by plain values only.

    Never raises, even if the exception's own code does.
    """
    try:
        report = _full_report(error)
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
        message=encodable(_formatted(str, error)),
        args=[_plain(arg) for arg in error.args],
        attributes={
            encodable(name): _plain(value)
            for name, value in vars(error).items()
            if name != "__notes__"
        },
        traceback=encodable(_traceback_of(error)[-_MAX_TRACEBACK:]),
    )


def restore_error(report: ErrorReport, actor: str, pid: int) -> Exception:
    """Return the exception to raise in the caller.

    Never raises: a report that does not fit its class arrives as a `RemoteError`.
    """
    error = _own_class(report) or RemoteError(report.name, report.message, report.traceback)
    if report.traceback:
        error.add_note(
            f"Remote traceback of actor {actor!r} (pid {pid}):\n{report.traceback.rstrip()}"
        )
    return error


def _traceback_of(error: BaseException) -> str:
    if not isinstance(error, VlaRlError):
        return format_short(error)
    return format_short(error.__cause__) if error.__cause__ is not None else ""


def _own_class(report: ErrorReport) -> Exception | None:
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
        return _built(kind, report)
    except Exception:  # a report is written by another process, and may hold anything
        return None


def _built(kind: type[Exception], report: ErrorReport) -> Exception:
    """Build the error, and print it once: what cannot be printed is of no use to the caller."""
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


def _formatted(way: Callable[[Any], str], value: Any) -> str:
    """Return `str` or `repr` of a value.

    If the application's own method raises, return a text that names its error.
    """
    try:
        return way(value)
    except Exception as failure:
        return f"(its __{way.__name__}__ raised {type(failure).__name__})"


def encodable(text: str) -> str:
    """Return the text if it can be encoded, else with escapes.

    A lone surrogate in a file name cannot be encoded.
    """
    return text.encode(errors="backslashreplace").decode()


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, str):
        return encodable(value)
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        return repr(value)
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return encodable(_formatted(repr, value))
