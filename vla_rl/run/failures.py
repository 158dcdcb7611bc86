"""Report a failed run as one error with the frames of user code only.

The command line and `train` both do.
"""

import asyncio
import functools
import traceback
from collections.abc import Callable, Coroutine
from typing import Any, Final, ParamSpec, TypeVar

from vla_rl.actors.room import lack_of_threads
from vla_rl.errors import CheckpointError, ConfigError, DataError, VlaRlError
from vla_rl.util.tracebacks import shorten

P = ParamSpec("P")
T = TypeVar("T")

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
            shorten(failure)
            if words := lack_of_threads(failure):
                raise ConfigError(words) from failure
            raise failure from failure.__cause__

    return reporting


def only_error(error: BaseException) -> BaseException:
    """Return the single error in a group, also a nested one; the group if its errors differ."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    members = _members_of(error)
    if len({(type(member), str(member)) for member in members}) > 1:
        return error
    for note in getattr(error, "__notes__", ()):
        members[0].add_note(note)
    if len(members) > 1:
        others = "1 more task" if len(members) == 2 else f"{len(members) - 1} more tasks"
        members[0].add_note(f"{others} failed in the same way")
    return members[0]


def _members_of(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    found: list[BaseException] = []
    for member in group.exceptions:
        found += _members_of(member) if isinstance(member, BaseExceptionGroup) else [member]
    return found


def explain(error: BaseException) -> str:
    """Describe an error for the person who has to act on it.

    For an error of vla_rl: its message and notes (an environment's own traceback is one of them),
    the lines of user code that led to it, and its cause. For any other error, which is a bug
    somewhere: its traceback, shortened by `vla_rl.util.tracebacks`. The errors of a group are described
    one after the other.
    """
    failure = only_error(error)
    shorten(failure)
    if words := lack_of_threads(failure):
        return f"error: {words}"
    if isinstance(failure, BaseExceptionGroup):
        members = _members_of(failure)
        return "\n".join([f"{len(members)} errors:", *map(_explained, members)])
    return _explained(failure)


def _explained(error: BaseException) -> str:
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
        lines.append(_explained(cause).replace("error:", "because of", 1))
    elif cause is not None and isinstance(error, CheckpointError | DataError):
        # an error in a file, not in code
        lines.append(f"because of: {type(cause).__name__}: {cause}")
    elif cause is not None:
        lines += ["because of:", *traceback.format_exception(cause)]
    return "\n".join(line.rstrip("\n") for line in lines)
