"""Hosts that share an engine, and the scheduler over them."""

from collections.abc import Callable

from rollout_fakes import CountingEngine, source

from vla_rl.remote_rollout.host_pace import ANY_KIND
from vla_rl.remote_rollout.host_runner import HostEpisodeRunner
from vla_rl.rollout import EpisodeScheduler, SchedulerConfig
from vla_rl.types import EpisodeSpec, Group, Shelved


class Cluster:
    """A scheduler of 4 groups of 4 per update over hosts that share an engine."""

    def __init__(
        self,
        keep: Callable[[Group], bool] | None = None,
        drop_shelved: Callable[[Shelved], None] | None = None,
        kind_of: Callable[[EpisodeSpec], str] = lambda episode: ANY_KIND,
        **settings: object,
    ) -> None:
        self.engine = CountingEngine()
        self.players = HostEpisodeRunner(0, drop_shelved, kind_of)
        config = SchedulerConfig(**{"groups_per_update": 4, "max_staleness": 1, **settings})
        self.scheduler = EpisodeScheduler(self.players, source(), config, keep=keep)

    async def update(self) -> list[Group]:
        version = self.scheduler.version
        groups = [group async for group in self.scheduler.groups_for_update(version)]
        self.engine.weight_version = version + 1
        self.players.published(version + 1)
        self.scheduler.trained(groups, version + 1)
        return groups
