"""Short tracebacks: the frames of the user's own code, without those of vla_rl around it.

The message of a `VlaRlError`, which vla_rl raises on purpose, tells the user what to do. Any other
error without a frame of the user's code keeps its whole traceback, because it may be a bug in
vla_rl. VLA_RL_TRACEBACK=full keeps every frame of every error, in this process and in those that it
starts.
"""

import asyncio
import functools
import os
import traceback
from pathlib import Path
from types import TracebackType
from typing import Final

from vla_rl.errors import VlaRlError

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


def shorten(error: BaseException) -> None:
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
    shorten(error)
    return "".join(traceback.format_exception(error))


def _shortened(error: BaseException) -> TracebackType | None:
    """Return the traceback from the first frame of user code on.

    Only the last of vla_rl's frames, which raised it, is left.
    """
    is_deliberate = isinstance(error, VlaRlError)
    frames = _frames(error.__traceback__)
    first = next((number for number, frame in enumerate(frames) if _is_of_user(frame)), None)
    if first is None:
        return None if is_deliberate else error.__traceback__
    shown: TracebackType | None = None
    for frame in reversed(frames[first:]):
        if not _filename(frame).startswith(_PACKAGE) or (frame is frames[-1] and not is_deliberate):
            shown = TracebackType(shown, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return shown


def _frames(found: TracebackType | None) -> list[TracebackType]:
    frames = []
    while found is not None:
        frames.append(found)
        found = found.tb_next
    return frames


def _is_of_user(frame: TracebackType) -> bool:
    name = _filename(frame)
    is_generated = name.startswith("<frozen ") or (
        name == "<string>" and frame.tb_frame.f_code.co_name == "__init__"
    )
    # compiled code has a file name without its folder, such as uvloop's
    is_compiled = name.endswith(".pyx")
    return not is_generated and not is_compiled and not name.startswith((_PACKAGE, *_libraries()))


def _filename(frame: TracebackType) -> str:
    return frame.tb_frame.f_code.co_filename
