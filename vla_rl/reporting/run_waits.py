"""Waits of a run at one instant: who waits, tasks, dead processes, and whether the loop answers."""

import asyncio
import sys
import threading
import time
from pathlib import Path
from types import FrameType

import msgspec

from vla_rl.actors.processes.liveness import describe_process
from vla_rl.util.stalls import (
    count_progress,
    format_thread_stack,
    list_awaiting_frames,
    list_recent_exits,
    list_tasks,
    list_waits,
    seconds_since_progress,
)

LOOP_ANSWERS_WITHIN_S = 0.5
"""Time after which a loop counts as blocked. A step of it takes milliseconds."""


class ListedWait(msgspec.Struct, frozen=True, kw_only=True):
    """One task that waits."""

    who: str
    on: str
    seconds: float
    process: str = ""
    """State of the process that has to answer, if it is one of this host."""


class ListedTask(msgspec.Struct, frozen=True, kw_only=True):
    """One task of the loop, and the line that it stands at."""

    name: str
    at: str


class ListedDeath(msgspec.Struct, frozen=True, kw_only=True):
    """One process that ended unexpectedly, with its last words."""

    what: str
    seconds: float


class RunWaits(msgspec.Struct, frozen=True, kw_only=True):
    """All that a run says about its waiting."""

    pid: int
    quiet_s: float
    """Seconds since the last progress."""

    progress: dict[str, int]
    blocked_at: str | None
    """Stack of the loop's thread if the loop does not answer; None if it does."""

    waits: tuple[ListedWait, ...]
    """The longest first."""

    tasks: tuple[ListedTask, ...]
    threads: tuple[ListedTask, ...]
    """Threads besides the loop's, and the line that each stands at."""

    deaths: tuple[ListedDeath, ...]
    """The newest last."""


def waits_of(loop: asyncio.AbstractEventLoop, loop_thread_id: int, pid: int) -> RunWaits:
    """Return what a run waits for now; called on any thread but the loop's."""
    answers = _answers(loop)
    now = time.monotonic()
    states: dict[int, str] = {}
    waits = list_waits()
    for wait in waits:
        if wait.pid and wait.pid not in states:
            states[wait.pid] = f"pid {wait.pid} is {describe_process(wait.pid)}"
    return RunWaits(
        pid=pid,
        quiet_s=seconds_since_progress(),
        progress=count_progress(),
        blocked_at=None if answers else format_thread_stack(loop_thread_id),
        waits=tuple(
            ListedWait(
                who=wait.who, on=wait.on, seconds=now - wait.since, process=states.get(wait.pid, "")
            )
            for wait in waits
        ),
        tasks=tuple(
            ListedTask(name=task.get_name(), at=_spelt(list_awaiting_frames(task.get_coro())))
            for task in list_tasks(loop)
        ),
        threads=_threads_besides(loop_thread_id),
        deaths=tuple(
            ListedDeath(what=death.what, seconds=now - death.at) for death in list_recent_exits()
        ),
    )


def _answers(loop: asyncio.AbstractEventLoop) -> bool:
    answered = threading.Event()
    try:
        loop.call_soon_threadsafe(answered.set)
    except RuntimeError:  # it is closed
        return False
    return answered.wait(LOOP_ANSWERS_WITHIN_S)


def _threads_besides(loop_thread_id: int) -> tuple[ListedTask, ...]:
    frames, left_out = sys._current_frames(), (loop_thread_id, threading.get_ident())
    return tuple(
        ListedTask(name=thread.name, at=_spelt([frames[thread.ident]]))
        for thread in threading.enumerate()
        if thread.ident not in left_out and thread.ident in frames
    )


def _spelt(frames: list[FrameType]) -> str:
    """Return the innermost functions with their lines, then the outermost."""
    # three, because the innermost is often asyncio's and the next an engine's or a pool's
    innermost = [_line(frame) for frame in reversed(frames[-3:])]
    outermost = [frames[0].f_code.co_qualname] if len(frames) > 3 else []
    return " in ".join([*innermost, *outermost]) or "its end"


def _line(frame: FrameType) -> str:
    path = Path(*Path(frame.f_code.co_filename).parts[-3:])
    return f"{frame.f_code.co_qualname} ({path}:{frame.f_lineno})"
