"""The episodes that run now, one task each, and the error that ends them all."""

import asyncio
from collections.abc import Coroutine
from types import TracebackType
from typing import Any

from vla_rl.rollout.owned_tasks import leave


class RunningEpisodes:
    """Owns the tasks of episodes: `open` once, `stop` and then `leave` at the end.

    The first error of an episode cancels all others; later ones become notes on it.
    """

    def __init__(self) -> None:
        self._tasks: asyncio.TaskGroup | None = None
        self._running: dict[int, asyncio.Task[None]] = {}
        self._beside: set[asyncio.Task[None]] = set()
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

    async def open(self) -> None:
        """Allow episodes to start."""
        self._tasks = asyncio.TaskGroup()
        await self._tasks.__aenter__()
        self.may_start = True

    def start(self, episode_id: int, episode: Coroutine[Any, Any, None]) -> None:
        """Run an episode in a task of its own; it calls `ended` when it is over."""
        assert self._tasks is not None
        self._running[episode_id] = self._tasks.create_task(episode, name=f"episode {episode_id}")

    def start_beside(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        """Run work about ended episodes in a task of its own; it counts as no episode."""
        assert self._tasks is not None
        task = self._tasks.create_task(work, name=name)
        self._beside.add(task)
        task.add_done_callback(self._beside.discard)

    def ended(self, episode_id: int) -> None:
        """Remove an episode that ran to its end, or was lost; a cancelled one stays."""
        del self._running[episode_id]

    def stop(self) -> None:
        """Cancel all episodes, the oldest first."""
        self.may_start, self._is_left = False, True
        # in a fixed order, so that a simulated run ends in the same way every time
        for episode_id in sorted(self._running):
            self._running[episode_id].cancel()
        for task in sorted(self._beside, key=lambda task: task.get_name()):
            task.cancel()

    async def leave(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Wait until all episodes have ended. Raises: the error that ended them, as it was."""
        assert self._tasks is not None
        await leave(self._tasks, kind, error, traceback)

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
