"""The task in which an agent runs one episode, and how it ends if the agent does not want to.

    episode is cancelled ─► agent is cancelled ─► it ends ─► its episode ends
                                         └ it goes on for `END_WITHIN_S` ─► it is never resumed again

An agent that catches every CancelledError would otherwise keep a run from stopping, and from saving
its checkpoint.
"""

import asyncio
import ctypes
import inspect
import logging
from collections.abc import Callable, Coroutine
from types import FrameType
from typing import Any, Final

from vla_rl.actors.stacks import awaited_chain, awaiting_frames
from vla_rl.errors import AgentError

logger = logging.getLogger(__name__)

END_WITHIN_S: Final = 5.0
"""Seconds in which an agent may clean up after it was cancelled."""

_COLLECT_S: Final = 0.1
"""Episodes that are left within this time share one line."""

_MOST_NAMED: Final = 10

_left: list[tuple[int, str]] = []
"""Episodes that were left and not yet reported, and where their agents stand."""


async def run_agent(start: Callable[[], Any], episode_id: int, described: str) -> Any:
    """Return what an agent returns.

    If the caller is cancelled, the agent is; if it has not ended after `END_WITHIN_S`, it is left
    where it stands, and a line names the episode.

    Args:
        start: calls the agent.
        episode_id: number of the episode.
        described: the episode in words, for an error.

    Raises: AgentError if `start` returns nothing to await, or if the agent raises an exception that
        is no `Exception`, such as that of `sys.exit`; what the agent raises.
    """
    agent = _Leavable(_awaited(start, described))
    owner = asyncio.current_task()
    assert owner is not None
    # calls that wait are listed under this name
    task: asyncio.Task[Any] = asyncio.create_task(agent, name=owner.get_name())
    try:
        await asyncio.wait((task,))
    except asyncio.CancelledError:
        await _end(task, agent, episode_id)
        if not task.done() or task.cancelled():
            raise
    return task.result()


async def _awaited(start: Callable[[], Any], described: str) -> Any:
    try:
        running = start()
        if not inspect.isawaitable(running):
            raise AgentError(
                f"the agent returned {shown(running)} at once; expected `async def agent(env, "
                "policy)`"
            )
        return await running
    except (Exception, asyncio.CancelledError, KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:
        # asyncio would end the whole loop at some of them, and no group of tasks expects the others
        first = _first_of(error)
        raise AgentError(
            f"the agent raised {type(first).__name__}: {first} while running {described}, expected "
            "an Exception, such as RuntimeError"
        ) from error


def _first_of(error: BaseException) -> BaseException:
    """Return the first error in a group of any depth that is no `Exception`; else the error."""
    while isinstance(error, BaseExceptionGroup):
        error = next(each for each in error.exceptions if not isinstance(each, Exception))
    return error


class _Leavable(Coroutine[Any, Any, Any]):
    """A coroutine that is not resumed any more once it is left."""

    def __init__(self, work: Coroutine[Any, Any, Any]) -> None:
        self._work = work
        self.is_left = False

    def send(self, value: Any) -> Any:
        if self.is_left:
            raise asyncio.CancelledError
        return self._work.send(value)

    def throw(self, *error: Any) -> Any:
        if self.is_left:
            raise asyncio.CancelledError
        return self._work.throw(*error)

    def close(self) -> None:
        self._work.close()

    def __await__(self) -> Any:
        return self._work.__await__()

    def __getattr__(self, name: str) -> Any:  # frames, for those who ask what a task waits for
        return getattr(self._work, name)


async def _end(task: "asyncio.Task[Any]", agent: _Leavable, episode_id: int) -> None:
    """Cancel an agent and wait for its end; leave it if it does not end."""
    task.cancel()
    if await _has_ended(task, END_WITHIN_S):
        return
    *_, stands = ["its end", *map(_place, awaiting_frames(agent)[:2])]  # the first is ours
    _left.append((episode_id, stands))
    agent.is_left = True
    task.cancel()
    others: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    await _has_ended(others, _COLLECT_S)
    if _left:
        _report()
    if task.done():
        kept = awaited_chain(agent)
        try:
            agent.close()
        except BaseException:  # it catches this one too
            keep_for_ever(kept)


def keep_for_ever(thing: object) -> None:
    """Keep an object beyond the end of the interpreter, which would collect it and what it holds.

    A coroutine that is collected gets a GeneratorExit. If it catches that as well and goes on, as
    `except BaseException` in an endless loop does, the process would never end.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def _place(frame: FrameType) -> str:
    return f"{frame.f_code.co_name} ({frame.f_code.co_filename}:{frame.f_lineno})"


async def _has_ended(task: "asyncio.Future[Any]", within_s: float) -> bool:
    """Wait for a task; each further cancellation of the caller cancels it again."""
    clock = asyncio.get_running_loop().time
    until = clock() + within_s
    while not task.done() and (left_s := until - clock()) > 0.0:
        try:
            await asyncio.wait((task,), timeout=left_s)
        except asyncio.CancelledError:
            task.cancel()
    return task.done()


def _report() -> None:
    """Write one line about all episodes that were left."""
    left = sorted(_left)
    _left.clear()
    number, stands = left[0]
    named = ", ".join(str(number) for number, _ in left[:_MOST_NAMED])
    more = f" and {len(left) - _MOST_NAMED} more" if len(left) > _MOST_NAMED else ""
    logger.warning(
        "%s not end within %g s of being cancelled, expected that agents let "
        "asyncio.CancelledError through: left without a result. The agent of episode %d stands in "
        "%s.",
        f"episode {number} did" if len(left) == 1 else f"episodes {named}{more} did",
        END_WITHIN_S,
        number,
        stands,
    )


def shown(value: Any) -> str:
    """Return a value with its type, short enough for an error."""
    text = repr(value)
    return (
        "None"
        if value is None
        else f"a {type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"
    )
