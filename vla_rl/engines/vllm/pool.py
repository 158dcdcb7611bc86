"""The engines that answer requests: each kept running in its slot, chosen for each request.

answer ─► route ─► Replica.answer_request ─► Answer
            ▲          │ dead, aborted, or a chunk of two versions
            └──────────┘
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from vla_rl.engines.config import VllmConfig
from vla_rl.engines.vllm.publication import Publication
from vla_rl.engines.vllm.replica import Replica
from vla_rl.engines.vllm.served import Answer, EngineLayout, EngineRequest, ReplyRules
from vla_rl.errors import ActorDied
from vla_rl.rollout import BatchStats, DecisionCounter
from vla_rl.types import Sampling

_log = logging.getLogger(__name__)


class EngineSlot:
    """A slot for one engine, which is kept running.

    Args:
        make: returns a replica that was not started.
        publication: holds the current weights, which a new replica gets before its first request.
        config: limits of time and restarts.
        changed: called when another replica takes the requests, when none does, and when none will
            any more.

    Attributes:
        replica: the current replica, if there is one.
        failure: set when the slot stays empty for good.
        num_restarts: number of restarts so far.
    """

    def __init__(
        self,
        make: Callable[[], Replica],
        publication: Publication,
        config: VllmConfig,
        changed: Callable[[], None],
    ) -> None:
        self._make, self._publication, self._config, self._changed = (
            make,
            publication,
            config,
            changed,
        )
        self.replica: Replica | None = None
        self.failure: ActorDied | None = None
        self.num_restarts = 0

    async def start_engine(self) -> None:
        """Start the first replica. Raises: ActorDied with the reason if it does not start."""
        await self._start()

    async def keep_running(self) -> None:
        """Watch the engine until cancelled, or until it has died too often without an answer."""
        failures = 0
        while self.replica is not None:
            replica = self.replica
            await self._watch(replica)
            # the first answer was to the engine's own test request
            has_worked = replica.num_answers > 1
            failures = 1 if has_worked else failures + 1
            await self.stop_engine()
            failures = await self._start_again(failures, replica.make_death_error())

    async def stop_engine(self) -> None:
        """Stop the current engine."""
        replica, self.replica = self.replica, None
        self._changed()
        if replica is not None:
            await replica.close()

    async def _start_again(self, failures: int, last: ActorDied) -> int:
        """Start replicas until one works or `max_restarts` is reached.

        Return the failures in a row, the last death included.
        """
        while failures <= self._config.max_restarts:
            self.num_restarts += 1
            try:
                await self._start()
            except ActorDied as error:
                failures, last = failures + 1, error
                _log.warning("%s", error)
            else:
                return failures
        cause = f"not started again after {failures} deaths in a row, the last one: {last.cause}"
        self.failure = ActorDied(last.name, last.pid, cause)
        _log.error("%s; its slot stays empty", self.failure)
        self._changed()
        return failures

    async def _start(self) -> None:
        """Start an engine once engines may be awake; put it to sleep if they are meanwhile."""
        await self._publication.awake.wait()
        replica = self._make()
        try:
            await replica.build()
            # else an update between its join and the last line of this block would miss it
            async with self._publication.turn:
                if self._publication.awake.is_set():
                    assert self._publication.current is not None
                    await replica.join(self._publication.current)
                else:
                    await replica.sleep()
                self.replica = replica
        except BaseException:
            await replica.close()
            raise
        self._changed()

    async def _watch(self, replica: Replica) -> None:
        """Wait for the replica's death.

        If it has not answered for a while, check it with a request for one token.
        """
        seen = -1
        while not replica.died.is_set():
            try:
                async with asyncio.timeout(self._config.health_every_s):
                    await replica.died.wait()
            except TimeoutError:
                if replica.num_answers == seen and not replica.is_asleep:
                    await self._probe(replica)
                seen = replica.num_answers
        _log.warning("engine %r (pid %d) died: %s", replica.name, replica.pid, replica.cause)

    async def _probe(self, replica: Replica) -> None:
        async with self._publication.turn:  # a paused engine does not answer
            if replica.is_asleep:
                return
            try:
                await replica.check_health()
            except ActorDied:
                return


MAX_QUEUE = 4096
"""Maximum number of requests in progress; further callers wait."""


class Router:
    """Has each request answered by one of the ready replicas, and by another one if that dies.

    Args:
        slots: the live list of the slots for engines.
        layout: layout of the policy's requests.
        attempts: number of deaths of engines after which a request fails.

    Attributes:
        is_open: whether requests are taken; its owner sets it, then calls `wake_callers`.
    """

    def __init__(self, slots: Sequence[EngineSlot], layout: EngineLayout, attempts: int) -> None:
        self._slots, self._attempts = slots, attempts
        self._is_chunk, self._reuses_prefixes = (
            layout.num_tokens is not None,
            layout.reuses_prefixes,
        )
        self._room = asyncio.Semaphore(MAX_QUEUE)
        self._changed = asyncio.Event()
        # weak: a task that ends takes its entry along, and no episode has to say that it is over
        self._assigned: WeakKeyDictionary[asyncio.Task[Any], Replica] = WeakKeyDictionary()
        self._counter = DecisionCounter()
        self.is_open = False

    async def answer(
        self, request: EngineRequest, sampling: Sampling, max_tokens: int, rules: ReplyRules
    ) -> Answer:
        """Repeat a request until an engine has answered it completely.

        Raises: ActorDied if engines died in all attempts, or none is started again any more;
        RuntimeError if the engine is not open.
        """
        clock = asyncio.get_running_loop().time
        deaths = 0
        async with self._room:
            self._counter.begin_decision(clock())
            try:
                while True:
                    replica = await self._route()
                    try:
                        answer = await replica.answer_request(request, sampling, max_tokens, rules)
                    except ActorDied:
                        deaths += 1
                        if deaths >= self._attempts:
                            raise
                        continue
                    # a chunk is one action: the learner has no log-prob for one of two policies
                    if not answer.is_aborted and not (self._is_chunk and answer.is_mixed):
                        return answer
            finally:
                self._counter.end_decision(clock())

    def ready(self) -> list[Replica]:
        """Return the replicas that take requests now."""
        replicas = [slot.replica for slot in self._slots]
        return [replica for replica in replicas if replica is not None and replica.is_ready]

    def wake_callers(self) -> None:
        """Let callers that wait for a replica look again."""
        self._changed.set()

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

    async def _route(self) -> Replica:
        """Return the replica with this conversation's keys and values, else the least loaded one.

        Waits until one is ready.
        """
        while True:
            ready = self.ready()
            if ready:
                return self._assign_replica(ready)
            if not self.is_open:
                raise RuntimeError("the vLLM engine is not open; ask inside its `async with` block")
            failures = [slot.failure for slot in self._slots if slot.failure is not None]
            if len(failures) == len(self._slots):
                raise failures[0]
            self._changed.clear()
            await self._changed.wait()

    def _assign_replica(self, ready: Sequence[Replica]) -> Replica:
        # an episode is one task, so its turns come from one task: no name of a conversation is
        # needed to send them to the engine that has read the earlier ones
        task = asyncio.current_task()
        assigned = self._assigned.get(task) if task is not None else None
        if assigned not in ready or assigned is None:
            assigned = min(ready, key=lambda replica: replica.num_running)
        if task is not None and self._reuses_prefixes:
            self._assigned[task] = assigned
        return assigned
