"""The engine processes of one policy: each kept running in its slot, all of them one pool.

An engine is started again by its slot and not by a restart policy of the actors' runtime: a restarted
engine needs the weights of now before its first request, and takes turns with updates for them; and one
that dies too often leaves the others serving, where an actor past its policy would end the whole run.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence

from vla_rl.engines.config import VllmConfig
from vla_rl.engines.engine_pool import EnginePool
from vla_rl.engines.vllm.publication import Publication
from vla_rl.engines.vllm.replica import Replica
from vla_rl.engines.vllm.served import Answer, EngineLayout, EngineRequest, ReplyRules
from vla_rl.errors import ActorDied
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

    # who waits                 for                     woken by
    # `_watch`                  `replica.died`          its process ends, is found stopped, or misses a deadline;
    #                                                   `health_every_s` without an answer: it is asked for a token
    # `start_engine`            `publication.awake`     `VllmEngine.wake`
    # `start_engine`, `_probe`  `publication.turn`      the end of an update, of a sleep, of another engine's start

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
            failures = await self._start_again(failures, replica.make_exit_error())

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
                await self.start_engine()
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

    async def start_engine(self) -> None:
        """Start an engine once engines may be awake; put it to sleep if they are meanwhile.

        Raises: ActorDied with the reason if it does not start.
        """
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


class ReplicaPool(EnginePool[Replica]):
    """The replicas of one policy, in their slots. See `EnginePool`.

    Args:
        slots: the live list of the slots for engines.
        layout: layout of the policy's requests.
        attempts: number of deaths of engines after which a request fails.
    """

    def __init__(self, slots: Sequence[EngineSlot], layout: EngineLayout, attempts: int) -> None:
        super().__init__(attempts, keeps_conversations=layout.reuses_prefixes)
        self._slots, self._is_chunk = slots, layout.num_tokens is not None

    def list_engines(self) -> list[Replica]:
        """Return the replicas that were started."""
        return [slot.replica for slot in self._slots if slot.replica is not None]

    def find_failure(self, *, has_waited: bool) -> ActorDied | None:
        """Return the first failure once every slot stays empty for good."""
        failures = [slot.failure for slot in self._slots if slot.failure is not None]
        return failures[0] if len(failures) == len(self._slots) else None

    async def answer_request(
        self, request: EngineRequest, sampling: Sampling, max_tokens: int, rules: ReplyRules
    ) -> Answer:
        """Repeat a request until an engine has answered it completely. Raises: as `answer`."""

        async def ask(replica: Replica) -> Answer | None:
            answer = await replica.answer_request(request, sampling, max_tokens, rules)
            # a chunk is one action: the learner has no log-prob for one of two policies
            is_usable = not answer.is_aborted and not (self._is_chunk and answer.is_mixed)
            return answer if is_usable else None

        return await self.answer(ask)
