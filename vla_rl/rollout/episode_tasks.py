"""The asyncio tasks in which episodes run: those of their agents, those of the scheduler.

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
from types import FrameType, TracebackType
from typing import Any, Final

from vla_rl.errors import AgentError
from vla_rl.rollout.agents import describe_value
from vla_rl.util.stalls import list_awaited, list_awaiting_frames
from vla_rl.util.tasks import leave_group

logger = logging.getLogger(__name__)

END_WITHIN_S: Final = 5.0
"""Seconds in which an agent may clean up after it was cancelled."""

_COLLECT_S: Final = 0.1
"""Episodes that are left within this time share one line."""

_MAX_NAMED: Final = 10

_abandoned: list[tuple[int, str]] = []
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
    # The agent has a task of its own: awaited directly, one that catches every CancelledError could
    # not be left.
    agent = _AbandonableCoroutine(_await_agent(start, described))
    owner = asyncio.current_task()
    assert owner is not None
    # calls that wait are listed under this name
    task: asyncio.Task[Any] = asyncio.create_task(agent, name=owner.get_name())
    try:
        await asyncio.wait((task,))
    except asyncio.CancelledError:
        await _end_agent(task, agent, episode_id)
        if not task.done() or task.cancelled():
            raise
    return task.result()


async def _await_agent(start: Callable[[], Any], described: str) -> Any:
    try:
        running = start()
        if not inspect.isawaitable(running):
            raise AgentError(
                f"the agent returned {describe_value(running)} at once; expected `async def agent(env, "
                "policy)`"
            )
        return await running
    except (Exception, asyncio.CancelledError, KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:
        # asyncio would end the whole loop at some of them, and no group of tasks expects the others
        first = _find_first(error)
        raise AgentError(
            f"the agent raised {type(first).__name__}: {first} while running {described}, expected "
            "an Exception, such as RuntimeError"
        ) from error


def _find_first(error: BaseException) -> BaseException:
    """Return the first error in a group of any depth that is no `Exception`; else the error."""
    while isinstance(error, BaseExceptionGroup):
        error = next(each for each in error.exceptions if not isinstance(each, Exception))
    return error


class _AbandonableCoroutine(Coroutine[Any, Any, Any]):
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


async def _end_agent(
    task: "asyncio.Task[Any]", agent: _AbandonableCoroutine, episode_id: int
) -> None:
    """Cancel an agent and wait for its end; leave it if it does not end."""
    task.cancel()
    if await _has_ended(task, END_WITHIN_S):
        return
    *_, stands = [
        "its end",
        *map(_describe_frame, list_awaiting_frames(agent)[:2]),
    ]  # the first is ours
    _abandoned.append((episode_id, stands))
    agent.is_left = True
    task.cancel()
    others: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    # A run that stops leaves many episodes of the same agent within milliseconds: one line instead
    # of one for each.
    await _has_ended(others, _COLLECT_S)
    if _abandoned:
        _report()
    if task.done():
        kept = list_awaited(agent)
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


def _describe_frame(frame: FrameType) -> str:
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
    left = sorted(_abandoned)
    _abandoned.clear()
    number, stands = left[0]
    named = ", ".join(str(number) for number, _ in left[:_MAX_NAMED])
    more = f" and {len(left) - _MAX_NAMED} more" if len(left) > _MAX_NAMED else ""
    logger.warning(
        "%s not end within %g s of being cancelled, expected that agents let "
        "asyncio.CancelledError through: left without a result. The agent of episode %d stands in "
        "%s.",
        f"episode {number} did" if len(left) == 1 else f"episodes {named}{more} did",
        END_WITHIN_S,
        number,
        stands,
    )


class RunningEpisodes:
    """Owns the tasks of episodes: `open_tasks` once, `cancel_all` and then `wait_until_ended` at the end.

    The first error of an episode cancels all others; later ones become notes on it.
    """

    def __init__(self) -> None:
        self._tasks: asyncio.TaskGroup | None = None
        self._running: dict[int, asyncio.Task[None]] = {}
        self._extra: set[asyncio.Task[None]] = set()
        self._is_left = False
        self.may_start = False
        """Whether new episodes may start."""

        self._failure: Exception | None = None

    def __len__(self) -> int:
        return len(self._running)

    @property
    def was_opened(self) -> bool:
        """Whether episodes run, or have run."""
        return self._tasks is not None

    async def open_tasks(self) -> None:
        """Allow episodes to start."""
        self._tasks = asyncio.TaskGroup()
        await self._tasks.__aenter__()
        self.may_start = True

    def start_episode(self, episode_id: int, episode: Coroutine[Any, Any, None]) -> None:
        """Run an episode in a task of its own; it calls `remove_ended` when it is over."""
        assert self._tasks is not None
        self._running[episode_id] = self._tasks.create_task(episode, name=f"episode {episode_id}")

    def start_extra(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        """Run work about ended episodes in a task of its own; it counts as no episode."""
        assert self._tasks is not None
        task = self._tasks.create_task(work, name=name)
        self._extra.add(task)
        task.add_done_callback(self._extra.discard)

    def remove_ended(self, episode_id: int) -> None:
        """Remove an episode that ran to its end, or was lost; a cancelled one stays."""
        del self._running[episode_id]

    def cancel_all(self) -> None:
        """Cancel all episodes, the oldest first."""
        self.may_start, self._is_left = False, True
        # in a fixed order, so that a simulated run ends in the same way every time
        for episode_id in sorted(self._running):
            self._running[episode_id].cancel()
        for task in sorted(self._extra, key=lambda task: task.get_name()):
            task.cancel()

    async def wait_until_ended(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Wait until all episodes have ended. Raises: the error that ended them, as it was."""
        assert self._tasks is not None
        await leave_group(self._tasks, kind, error, traceback)

    def fails_the_run(self, error: Exception) -> bool:
        """Return whether this is the first error; a later one becomes a note on it."""
        if self._failure is not None:
            # a batch that fails gives all its episodes the same error
            if error is not self._failure:
                self._failure.add_note(
                    f"another episode failed too: {type(error).__name__}: {error}"
                )
            return False
        self._failure = error
        # the task group cancels the others; no new episode may start meanwhile
        self.may_start = False
        return True

    def require_running(self) -> None:
        """Raise RuntimeError instead of waiting for groups that will not come.

        A run that fails cancels its owner before it is left.
        """
        if self._tasks is None or self._is_left:
            raise RuntimeError(
                "no group will come: the scheduler is not open; iterate inside its `async with`"
            ) from self._failure
