"""Hosts with environments and an episode store, in this loop, and the scheduler over them."""

import asyncio
from collections.abc import Callable

from rollout_fakes import CountingEngine, LatencyPool, source

from vla_rl.errors import ActorDied
from vla_rl.remote_rollout.episode_store import EpisodeStore, materialise
from vla_rl.remote_rollout.host_pace import ANY_KIND
from vla_rl.remote_rollout.host_runner import HostEpisodeRunner
from vla_rl.rollout import (
    EpisodeLost,
    EpisodeScheduler,
    LocalEpisodeRunner,
    SchedulerConfig,
    embodied_agent,
)
from vla_rl.rollout.policies import DecisionCounts
from vla_rl.types import EpisodeSpec, Group, ImageCacheRef, Trajectory


class FarHost:
    """A host with a pool of its own, which can be cut off, and whose episode store may outlive it.

    Args:
        mean_s: how long decisions take.
        episode store: its arrays; None for an episode store without room.
        kept: keys of the arrays that it was taken over with; none for a new host.
    """

    def __init__(
        self,
        engine: CountingEngine,
        num_slots: int = 2,
        mean_s: float = 0.01,
        store: EpisodeStore | None = None,
        kept: tuple[int, ...] = (),
    ) -> None:
        self.store = store if store is not None else EpisodeStore("far", 0)
        self._kept = self.store.keep_only(kept)
        self.pool = LatencyPool(num_slots, seed=num_slots, mean_s=mean_s)
        self._runner = LocalEpisodeRunner(self.pool, engine, embodied_agent)
        self._cut = asyncio.Event()
        self.num_run = self.num_dropped = 0
        self.has_played, self.is_asked_for_arrays = asyncio.Event(), asyncio.Event()
        self.is_slow_to_send = False

    @property
    def num_slots(self) -> int:
        return self._runner.num_slots

    @property
    def weight_version(self) -> int:
        return self._runner.weight_version

    @property
    def pending_version(self) -> int:
        return self._runner.weight_version

    def cut(self) -> None:
        self._cut.set()

    async def run_episode(
        self, episode: EpisodeSpec, *, timeout_s: float | None = None
    ) -> Trajectory:
        playing = asyncio.ensure_future(self._runner.run_episode(episode, timeout_s=timeout_s))
        cut = asyncio.ensure_future(self._cut.wait())
        try:
            await asyncio.wait((playing, cut), return_when=asyncio.FIRST_COMPLETED)
            if not playing.done():
                raise ActorDied("far", 0, "host unreachable for 1.2 s")
            self.num_run += 1
            self.has_played.set()
            return self.store.put_arrays(playing.result())
        finally:
            for task in (playing, cut):
                task.cancel()
            await asyncio.wait((playing, cut))

    def holds_arrays(self, trajectory: Trajectory) -> bool:
        return trajectory.episode_ref is None or trajectory.episode_ref.key in self._kept

    async def materialise(self, trajectory: Trajectory) -> Trajectory:
        if self._cut.is_set():
            raise ActorDied("far", 0, "host unreachable for 1.2 s")
        assert trajectory.episode_ref is not None
        self.is_asked_for_arrays.set()
        if self.is_slow_to_send:
            await asyncio.Event().wait()
        arrays = self.store.take_arrays(trajectory.episode_ref.key)
        if arrays is None:
            raise EpisodeLost(trajectory.episode, "died", "far was started again since")
        return materialise(trajectory, arrays)

    def drop_arrays(self, trajectory: Trajectory) -> None:
        assert trajectory.episode_ref is not None
        self.store.drop_episode(trajectory.episode_ref.key)
        self.num_dropped += 1

    def decisions(self, now: float) -> DecisionCounts:
        return self._runner.decisions(now)

    def on_more_capacity(self, call: Callable[[], None]) -> None:
        pass


class Cluster:
    """A scheduler of 4 groups of 4 per update over hosts that share an engine."""

    def __init__(
        self,
        keep: Callable[[Group], bool] | None = None,
        drop_images: Callable[[ImageCacheRef], None] | None = None,
        kind_of: Callable[[EpisodeSpec], str] = lambda episode: ANY_KIND,
        **settings: object,
    ) -> None:
        self.engine = CountingEngine()
        self.runner = HostEpisodeRunner(0, drop_images, kind_of)
        config = SchedulerConfig(**{"groups_per_update": 4, "max_staleness": 1, **settings})
        self.scheduler = EpisodeScheduler(self.runner, source(), config, keep=keep)

    async def update(self) -> list[Group]:
        version = self.scheduler.version
        groups = [group async for group in self.scheduler.groups_for_update(version)]
        self.engine.weight_version = version + 1
        self.runner.mark_published(version + 1)
        self.scheduler.mark_trained(groups, version + 1)
        return groups
