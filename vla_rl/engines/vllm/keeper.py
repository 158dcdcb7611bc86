"""Keeps one place filled with a working engine: starts it, looks after its health, replaces it when it is gone."""

import asyncio
import logging
from collections.abc import Callable

from vla_rl.engines.vllm.config import VllmConfig
from vla_rl.engines.vllm.publication import Publication
from vla_rl.engines.vllm.replica import Replica
from vla_rl.errors import ActorDied

_log = logging.getLogger(__name__)


class Keeper:
    """One place for an engine.

    Args:
        make: a replica that was not started.
        publication: whose current weights a new one gets, before it is asked anything.
        config: of its life.
        changed: called whenever the replica that can be asked is another one, or none, or will never be one.

    Attributes:
        replica: the one that is there, if any.
        failure: set once it has been given up.
        num_restarts: so far.
    """

    def __init__(
        self,
        make: Callable[[], Replica],
        publication: Publication,
        config: VllmConfig,
        changed: Callable[[], None],
    ) -> None:
        self._make, self._publication, self._config, self._changed = make, publication, config, changed
        self.replica: Replica | None = None
        self.failure: ActorDied | None = None
        self.num_restarts = 0

    async def open(self) -> None:
        """Start the first one. Raises: ActorDied saying why it does not start."""
        await self._start()

    async def run(self) -> None:
        """Look after the engine until cancelled, or until it has died too often without having answered."""
        failures = 0
        while self.replica is not None:
            replica = self.replica
            await self._watch(replica)
            has_worked = replica.num_answers > 1  # the first one is the keeper's own
            failures = 1 if has_worked else failures + 1
            await self.close()
            failures = await self._start_again(failures, replica.death())

    async def close(self) -> None:
        """End the engine that is there."""
        replica, self.replica = self.replica, None
        self._changed()
        if replica is not None:
            await replica.close()

    async def _start_again(self, failures: int, last: ActorDied) -> int:
        """As often as it takes and is allowed; gives the failures in a row, the one before included."""
        while failures <= self._config.max_restarts:
            self.num_restarts += 1
            try:
                await self._start()
            except ActorDied as error:
                failures, last = failures + 1, error
                _log.warning("%s", error)
            else:
                return failures
        cause = f"given up after {failures} deaths in a row, the last one: {last.cause}"
        self.failure = ActorDied(last.name, last.pid, cause)
        _log.error("%s; its place stays empty", self.failure)
        self._changed()
        return failures

    async def _start(self) -> None:
        """Fill the place, once the engines are not to sleep; with one that sleeps where that is wished meanwhile."""
        await self._publication.awake.wait()
        replica = self._make()
        try:
            await replica.build()
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
        """Until it is dead; one that answered nobody for a while is asked for a token."""
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
        async with self._publication.turn:  # a paused engine answers nobody
            if replica.is_asleep:
                return
            try:
                await replica.check_health()
            except ActorDied:
                return
