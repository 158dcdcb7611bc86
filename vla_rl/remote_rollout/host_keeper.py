"""Keeps one host running episodes: brings it up, and again each time that it dies.

bring up ─► episodes ─► its process or the connection dies ─► bring up again
                             └ too often, or it cannot run them: left alone until it joins again
"""

import logging
import time
from collections.abc import Awaitable, Callable
from typing import Final

from vla_rl.actors import RestartPolicy
from vla_rl.actors.placement import Intensity
from vla_rl.cluster import Host
from vla_rl.errors import ActorDied, CheckpointError, ConfigError, EnvError, RemoteError
from vla_rl.remote_rollout.rollout_host import RolloutHost

logger = logging.getLogger(__name__)

RESTARTS: Final = RestartPolicy(max_restarts=3, within_s=120.0)
"""Deaths of the process on a host that stays, after which it is left alone until it rejoins."""


class HostKeeper:
    """Keeps one host.

    Args:
        host: the host.
        bring_up: lets the actor on it run episodes, and returns that actor.
        gone: called with its name once it runs no episode any more.
        kill: ends the actor.
    """

    def __init__(
        self,
        host: Host,
        bring_up: Callable[[Host], Awaitable[RolloutHost]],
        gone: Callable[[str], None],
        kill: Callable[[RolloutHost], Awaitable[None]],
    ) -> None:
        self.host = host
        self._bring_up, self._gone, self._kill = bring_up, gone, kill
        self._actor: RolloutHost | None = None

    async def begin(self) -> None:
        """Bring it up at the start of the run.

        If its process or the connection dies, `run` tries again. Raises: any other error.
        """
        try:
            self._actor = await self._bring_up(self.host)
        except (ActorDied, TimeoutError) as death:
            logger.warning("host %s is tried again: %s", self.host.name, death)

    async def run(self) -> None:
        """Keep it running episodes until cancelled, because it left, or until it fails too often."""
        deaths = Intensity(RESTARTS)
        try:
            while True:
                try:
                    self._actor = self._actor or await self._bring_up_late()
                    if self._actor is None:
                        return
                    await self._actor.stay()
                except (ActorDied, TimeoutError) as death:
                    self._gone(self.host.name)
                    if not deaths.admit(time.monotonic()):
                        leave_alone(self.host, death)
                        return
                    self._actor = None
        finally:
            self._gone(self.host.name)
            if self._actor is not None:
                await self._kill(self._actor)

    async def _bring_up_late(self) -> RolloutHost | None:
        """Bring it up during the run; return None if it cannot run the episodes.

        Those that were there at the start could, so the run goes on without it.
        """
        try:
            return await self._bring_up(self.host)
        except TimeoutError:  # an OSError too, but one that may pass
            raise
        except (ConfigError, EnvError, CheckpointError, RemoteError, OSError) as error:
            leave_alone(self.host, error)
            return None


def leave_alone(host: Host, error: Exception) -> None:
    """Say that a host runs no episodes until it joins again, and why."""
    logger.warning(
        "host %s is left alone until it joins again; its last failure: %s", host.name, error
    )
