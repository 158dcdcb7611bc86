"""The engines of one policy that answer requests, in processes of vLLM or on servers.

answer ─► choose ─► ask ─► result
            ▲         │ the engine died, or its answer cannot be used
            └─────────┘
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, Generic, Protocol, TypeVar
from weakref import WeakKeyDictionary

from vla_rl.errors import ActorDied
from vla_rl.rollout import BatchStats, DecisionCounter

MAX_QUEUE: Final = 4096
"""Maximum number of requests in progress; further callers wait."""


class PooledEngine(Protocol):
    """One engine of a pool: a `Replica` of vLLM, or a `ModelServer`."""

    num_running: int

    @property
    def is_ready(self) -> bool:
        """Whether it takes requests."""
        ...


E = TypeVar("E", bound=PooledEngine)
T = TypeVar("T")


class EnginePool(ABC, Generic[E]):
    """Has each request answered by one of the ready engines, and by another one if that dies.

    Args:
        attempts: number of deaths of engines after which a request fails.
        keeps_conversations: whether a task's requests go to the engine that answered its earlier ones.
        wait_limit_s: longest time for which a request waits while no engine is ready and no update is
            on its way; None: until its owner closes the pool.

    Attributes:
        is_open: whether requests are taken; its owner sets it, then calls `wake_callers`.
        is_paused: whether requests wait although engines are ready, as in an update.
    """

    def __init__(
        self,
        attempts: int,
        *,
        keeps_conversations: bool = False,
        wait_limit_s: float | None = None,
    ) -> None:
        self._attempts, self._wait_limit_s = attempts, wait_limit_s
        self._keeps_conversations = keeps_conversations
        # An evaluation of thousands of starts asks them all at once. Beyond some thousands a longer
        # queue feeds no engine better, and each request holds its images meanwhile.
        self._room = asyncio.Semaphore(MAX_QUEUE)
        self._changed = asyncio.Event()
        # weak: a task that ends takes its entry along, and no episode has to say that it is over
        self._assigned: WeakKeyDictionary[asyncio.Task[Any], E] = WeakKeyDictionary()
        self._counter = DecisionCounter()
        self.is_open = self.is_paused = False

    @abstractmethod
    def list_engines(self) -> Sequence[E]:
        """Return the engines that there are now, in whatever state."""

    def find_failure(self, *, has_waited: bool) -> ActorDied | None:
        """Return why no engine will be ready, if that is known.

        `has_waited`: a request has waited for `wait_limit_s`.
        """
        return None

    def ready(self) -> list[E]:
        """Return the engines that take requests now."""
        return [engine for engine in self.list_engines() if engine.is_ready]

    def wake_callers(self) -> None:
        """Let callers look again that wait for engines to become ready or idle."""
        self._changed.set()

    # who waits                for              woken by
    # `answer`, before its turn `_room`         a request that ends
    # `answer`, with an engine the answer       the engine; its death raises here, and another one is chosen
    # `_choose`                `_changed`       an engine that has started or was given up, a server that answers
    #                                           again, an update that has ended; `wait_limit_s`

    async def answer(self, ask: Callable[[E], Awaitable[T | None]]) -> T:
        """Call `ask` with one engine after the other until it returns a result other than None.

        Raises: ActorDied if engines died in all attempts, or none will be ready any more;
        RuntimeError if the pool is not open; what `ask` raises.
        """
        clock = asyncio.get_running_loop().time
        deaths = 0
        async with self._room:
            self._counter.begin_decision(clock())
            try:
                while True:
                    engine = await self._choose()
                    try:
                        found = await ask(engine)
                    except ActorDied:
                        # A request may be what kills its engines, as one that exhausts their memory
                        # does: it is not sent to every engine in turn.
                        deaths += 1
                        if deaths >= self._attempts:
                            raise
                        continue
                    finally:
                        self.wake_callers()
                    if found is not None:
                        return found
            finally:
                self._counter.end_decision(clock())

    def stats(self, now: float, opened_at: float) -> BatchStats:
        """Return the number of requests, and the share of time with one running.

        Time counts since `opened_at`. The engines decide what they batch.
        """
        elapsed = now - opened_at
        return BatchStats(
            num_batches=0,
            num_requests=self._counter.num_decisions,
            busy_share=self._counter.asked_s(now) / elapsed if elapsed > 0 else 0.0,
            num_queued=self._counter.num_waiting,
            batch_sizes={},
        )

    async def _choose(self) -> E:
        """Return the engine with this conversation's keys and values, else the least loaded one.

        Waits until one is ready.
        """
        # nearly every request finds an engine at once, and needs no timer
        if (found := self._find_engine()) is not None:
            return found
        limit = asyncio.timeout(None)
        try:
            async with limit:
                while (found := self._find_engine()) is None:
                    # An update may take longer than a lost server is waited for: its time is not
                    # counted before the first look after it.
                    if (
                        self._wait_limit_s is not None
                        and limit.when() is None
                        and not self.is_paused
                    ):
                        limit.reschedule(asyncio.get_running_loop().time() + self._wait_limit_s)
                    self._changed.clear()
                    await self._changed.wait()
                return found
        except TimeoutError as error:
            failure = self.find_failure(has_waited=True)
            assert failure is not None
            raise failure from error

    def _find_engine(self) -> E | None:
        if not self.is_open:
            raise RuntimeError("the engine is not open; ask inside its `async with` block")
        if self.is_paused:
            return None
        if ready := self.ready():
            return self._assign(ready)
        if (failure := self.find_failure(has_waited=False)) is not None:
            raise failure
        return None

    def _assign(self, ready: Sequence[E]) -> E:
        # an episode is one task, so its turns come from one task: no name of a conversation is
        # needed to send them to the engine that has read the earlier ones
        task = asyncio.current_task() if self._keeps_conversations else None
        assigned = self._assigned.get(task) if task is not None else None
        if assigned not in ready or assigned is None:
            assigned = min(ready, key=lambda engine: engine.num_running)
        if task is not None:
            self._assigned[task] = assigned
        return assigned
