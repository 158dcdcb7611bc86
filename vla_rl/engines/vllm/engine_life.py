"""Whether one engine lives: how its death is noticed, what its callers get, what is killed.

its process ends ───────► EngineProcess ─┐
its process is stopped ─► EngineWatch ───┼► note_death ─► died; every waiting caller goes on
an answer is overdue, or an error ───────┘
"""

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import TypeVar

from vla_rl.engines.vllm.engine_process import EngineProcess
from vla_rl.engines.vllm.engine_thread import EngineThread
from vla_rl.engines.vllm.watch import EngineWatch
from vla_rl.errors import ActorDied, ActorFrozen

T = TypeVar("T")


class EngineLife:
    """The life of one engine's processes, from `start` to `close`.

    Args: `name`, of the engine, in messages.

    Attributes:
        died: set when it is dead.
        cause: cause of its death.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.died = asyncio.Event()
        self.cause = "not started"
        self._thread = EngineThread(name)
        self._watch = EngineWatch(self._processes, self._note_frozen)
        self._process = EngineProcess()

    @property
    def pid(self) -> int:
        """Process id; 0 before the process has reported it."""
        return self._process.pid

    def start(self) -> None:
        """Watch whatever `run` starts."""
        self._watch.start()

    async def run(self, work: Callable[[], T]) -> T:
        """Start processes by `work()`, in the thread that they live as long as."""
        return await self._thread.run(work)

    def note_pid(self, pid: int) -> None:
        """Note the id that its process has reported: from now on, its end is noticed at once."""
        self._process.watch(pid, self.note_end)

    def limit(self, limit_s: float | None) -> AbstractAsyncContextManager[asyncio.Timeout]:
        """Limit a block that waits for it, as `EngineWatch.limit`: its death ends the block too."""
        return self._watch.limit(limit_s)

    def note_death(self, cause: str, *, frozen: bool = False) -> ActorDied:
        """Mark it as dead and return the error for callers.

        A frozen process is killed, so that it cannot answer later.
        """
        if not self.died.is_set():
            self.cause = cause
            self.died.set()
            self._watch.end()  # vLLM raises in waiting calls too, but only after its clean-up
        if frozen:
            self._kill()
        return ActorFrozen(self._name, self.pid, cause) if frozen else self.death()

    def note_end(self) -> ActorDied:
        """Mark it as dead because its process has ended, and return the error for callers."""
        return self.note_death(self._process.how_it_ended())

    def note_overdue(self, cause: str) -> ActorDied:
        """Return the error after a missed deadline: the engine's death if it has died.

        Otherwise it counts as frozen and is killed.
        """
        return self.death() if self.died.is_set() else self.note_death(cause, frozen=True)

    def death(self) -> ActorDied:
        """Return the error that callers get from now on."""
        return ActorDied(self._name, self.pid, self.cause)

    async def close(self) -> None:
        """Kill what still runs, and free what this process holds of it. Call `note_death` before."""
        self._kill()
        await self._thread.close()
        self._process.close()

    def _note_frozen(self, pid: int) -> None:
        self.note_death(f"its process {pid} was stopped by a signal such as SIGSTOP", frozen=True)

    def _processes(self) -> list[int]:
        """Return the processes to watch: the engine's.

        Before its id is known, they are all processes started for it.
        """
        return [self.pid] if self.pid else self._thread.processes()

    def _kill(self) -> None:
        self._process.kill()
        self._thread.kill()
