"""Stacks of the tasks of a loop and of the threads of a process, read from any thread."""

import asyncio
import sys
import traceback
from types import FrameType
from typing import Any

_FRAMES = ("cr_frame", "gi_frame", "ag_frame")
_AWAITED = ("cr_await", "gi_yieldfrom", "ag_await")


def tasks_of(loop: asyncio.AbstractEventLoop) -> "list[asyncio.Task[Any]]":
    """Return all tasks of a loop by name; asyncio retries if the set changes meanwhile."""
    return sorted(asyncio.all_tasks(loop), key=lambda task: task.get_name())


def awaiting_frames(awaited: Any) -> list[FrameType]:
    """Return the frames from a task's outermost coroutine to the suspended one."""
    frames = []
    for each in awaited_chain(awaited):
        frame = _first(each, _FRAMES)
        if frame is None:
            break
        frames.append(frame)
    return frames


def awaited_chain(awaited: Any) -> list[Any]:
    """Return a coroutine, what it awaits, what that awaits, and so on."""
    chain = []
    while awaited is not None:
        chain.append(awaited)
        awaited = _first(awaited, _AWAITED)
    return chain


def _first(awaited: Any, names: tuple[str, ...]) -> Any:
    return next(
        (found for name in names if (found := getattr(awaited, name, None)) is not None), None
    )


def thread_stack(thread_id: int) -> str:
    """Return the stack of a thread as text; the innermost call is last."""
    frame = sys._current_frames().get(thread_id)
    lines = "".join(traceback.format_stack(frame)) if frame is not None else "    it has ended\n"
    return lines.rstrip()
