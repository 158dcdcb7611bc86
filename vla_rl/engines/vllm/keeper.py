"""Keeps a working engine in one place: starts, watches and replaces it."""

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
        make: returns a replica that was not started.
        publication: holds the current weights, which a new replica gets before its first request.
        config: limits of time and restarts.
        changed: called when another replica takes the requests, when none does, and when none will
            any more.

    Attributes:
        replica: the current replica, if there is one.
        failure: set when the place stays empty for good.
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

    async def open(self) -> None:
        """Start the first replica. Raises: ActorDied with the reason if it does not start."""
        await self._start()

    async def run(self) -> None:
        """Watch the engine until cancelled, or until it has died too often without an answer."""
        failures = 0
        while self.replica is not None:
            replica = self.replica
            await self._watch(replica)
            # the first answer was to the engine's own test request
            has_worked = replica.num_answers > 1
            failures = 1 if has_worked else failures + 1
            await self.close()
            failures = await self._start_again(failures, replica.death())

    async def close(self) -> None:
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
        _log.error("%s; its place stays empty", self.failure)
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
