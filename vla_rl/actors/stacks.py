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
    while awaited is not None:
        frame = next(
            (found for name in _FRAMES if (found := getattr(awaited, name, None)) is not None), None
        )
        if frame is None:
            break
        frames.append(frame)
        awaited = next(
            (found for name in _AWAITED if (found := getattr(awaited, name, None)) is not None),
            None,
        )
    return frames


def thread_stack(thread_id: int) -> str:
    """Return the stack of a thread as text; the innermost call is last."""
    frame = sys._current_frames().get(thread_id)
    lines = "".join(traceback.format_stack(frame)) if frame is not None else "    it has ended\n"
    return lines.rstrip()
