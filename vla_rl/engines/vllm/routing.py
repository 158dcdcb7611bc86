"""Routing of requests to the engine processes that are ready.

answer ─► route ─► Replica.ask ─► Answer
            ▲          │ dead, aborted, or a chunk of two versions
            └──────────┘
"""

import asyncio
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

from vla_rl.engines.vllm.keeper import Keeper
from vla_rl.engines.vllm.replica import Replica
from vla_rl.engines.vllm.requests import Answer, ReplyRules
from vla_rl.engines.vllm.served import EngineLayout, EngineRequest
from vla_rl.errors import ActorDied
from vla_rl.rollout import BatchStats, DecisionGauge
from vla_rl.types import Sampling

MAX_QUEUE = 4096
"""Maximum number of requests in progress; further callers wait."""


class Router:
    """Has each request answered by one of the ready replicas, and by another one if that dies.

    Args:
        keepers: the live list of the places for engines.
        layout: layout of the policy's requests.
        attempts: number of deaths of engines after which a request fails.

    Attributes:
        is_open: whether requests are taken; its owner sets it, then calls `wake_callers`.
    """

    def __init__(self, keepers: Sequence[Keeper], layout: EngineLayout, attempts: int) -> None:
        self._keepers, self._attempts = keepers, attempts
        self._is_chunk, self._reuses_prefixes = (
            layout.num_tokens is not None,
            layout.reuses_prefixes,
        )
        self._room = asyncio.Semaphore(MAX_QUEUE)
        self._changed = asyncio.Event()
        # weak: a task that ends takes its entry along, and no episode has to say that it is over
        self._homes: WeakKeyDictionary[asyncio.Task[Any], Replica] = WeakKeyDictionary()
        self._gauge = DecisionGauge()
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
            self._gauge.enter(clock())
            try:
                while True:
                    replica = await self._route()
                    try:
                        answer = await replica.ask(request, sampling, max_tokens, rules)
                    except ActorDied:
                        deaths += 1
                        if deaths >= self._attempts:
                            raise
                        continue
                    # a chunk is one action: the learner has no log-prob for one of two policies
                    if not answer.is_aborted and not (self._is_chunk and answer.is_mixed):
                        return answer
            finally:
                self._gauge.leave(clock())

    def ready(self) -> list[Replica]:
        """Return the replicas that take requests now."""
        replicas = [keeper.replica for keeper in self._keepers]
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
            num_requests=self._gauge.num_decisions,
            busy_share=self._gauge.asked_s(now) / elapsed if elapsed > 0 else 0.0,
            num_queued=self._gauge.num_waiting,
            batch_sizes={},
        )

    async def _route(self) -> Replica:
        """Return the replica with this conversation's keys and values, else the least loaded one.

        Waits until one is ready.
        """
        while True:
            ready = self.ready()
            if ready:
                return self._home(ready)
            if not self.is_open:
                raise RuntimeError("the vLLM engine is not open; ask inside its `async with` block")
            failures = [keeper.failure for keeper in self._keepers if keeper.failure is not None]
            if len(failures) == len(self._keepers):
                raise failures[0]
            self._changed.clear()
            await self._changed.wait()

    def _home(self, ready: Sequence[Replica]) -> Replica:
        # an episode is one task, so its turns come from one task: no name of a conversation is
        # needed to send them to the engine that has read the earlier ones
        task = asyncio.current_task()
        home = self._homes.get(task) if task is not None else None
        if home not in ready or home is None:
            home = min(ready, key=lambda replica: replica.num_running)
        if task is not None and self._reuses_prefixes:
            self._homes[task] = home
        return home
