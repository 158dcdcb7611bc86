"""Episodes over several hosts: the freest one runs the next, a lost one loses what it runs, a slow
one gets less.
"""

import asyncio
from collections import Counter
from collections.abc import Callable

import pytest
from rollout_fakes import CountingEngine, LatencyPool, source

from vla_rl.errors import ActorDied
from vla_rl.rollout import EpisodeScheduler, LocalPlayer, SchedulerConfig, embodied_agent
from vla_rl.rollout.host_players import HostPlayers
from vla_rl.rollout.policies import DecisionCounts
from vla_rl.rollout.simulated_time import run_in_simulated_time
from vla_rl.types import EpisodeSpec, Trajectory


class FarHost:
    """A host with a pool of its own, which can be cut off; decisions take `mean_s`."""

    def __init__(self, engine: CountingEngine, num_slots: int = 2, mean_s: float = 0.01) -> None:
        pool = LatencyPool(num_slots, seed=num_slots, mean_s=mean_s)
        self._player = LocalPlayer(pool, engine, embodied_agent)
        self._cut = asyncio.Event()
        self.num_played = 0

    @property
    def num_slots(self) -> int:
        return self._player.num_slots

    @property
    def weight_version(self) -> int:
        return self._player.weight_version

    def cut(self) -> None:
        self._cut.set()

    async def play(self, episode: EpisodeSpec, *, timeout_s: float | None = None) -> Trajectory:
        playing = asyncio.ensure_future(self._player.play(episode, timeout_s=timeout_s))
        cut = asyncio.ensure_future(self._cut.wait())
        try:
            await asyncio.wait((playing, cut), return_when=asyncio.FIRST_COMPLETED)
            if not playing.done():
                raise ActorDied("far", 0, "host unreachable for 1.2 s")
            self.num_played += 1
            return playing.result()
        finally:
            for task in (playing, cut):
                task.cancel()
            await asyncio.wait((playing, cut))

    def decisions(self, now: float) -> DecisionCounts:
        return self._player.decisions(now)

    def when_slots_come(self, call: Callable[[], None]) -> None:
        pass


class Cluster:
    """A scheduler of 4 groups of 4 per update over hosts that share an engine."""

    def __init__(self, **settings: object) -> None:
        self.engine = CountingEngine()
        self.players = HostPlayers(0)
        config = SchedulerConfig(**{"groups_per_update": 4, "max_staleness": 1, **settings})
        self.scheduler = EpisodeScheduler(self.players, source(), config)

    async def update(self) -> None:
        version = self.scheduler.version
        groups = [group async for group in self.scheduler.groups_for_update(version)]
        self.engine.weight_version = version + 1
        self.players.published(version + 1)
        self.scheduler.trained(groups, version + 1)


def test_the_host_with_the_most_room_runs_the_next_episode() -> None:
    async def main() -> None:
        cluster = Cluster()
        small, large = FarHost(cluster.engine, 2), FarHost(cluster.engine, 6)
        cluster.players.add("small", small)
        cluster.players.add("large", large)
        async with cluster.engine.batcher, cluster.scheduler:
            assert cluster.players.num_slots == 8
            for _ in range(5):
                await cluster.update()
            await asyncio.sleep(0)
            running = cluster.players.metrics()
            assert running["hosts/small/episodes_playing"] <= 2
            assert running["hosts/large/episodes_playing"] <= 6
        assert large.num_played > 2 * small.num_played

    run_in_simulated_time(main())


def test_a_lost_host_costs_its_running_episodes_which_run_again_elsewhere() -> None:
    async def main() -> None:
        cluster = Cluster()
        lost, stays = FarHost(cluster.engine, 4), FarHost(cluster.engine, 4)
        cluster.players.add("lost", lost)
        cluster.players.add("stays", stays)
        async with cluster.engine.batcher, cluster.scheduler:
            await cluster.update()
            lost.cut()
            cluster.players.drop("lost")
            played = lost.num_played
            for _ in range(3):
                await cluster.update()
            assert lost.num_played == played
            assert 1 <= cluster.scheduler.metrics()["rollout/lost/died"] <= 4
            cluster.scheduler.check_conservation()
            assert cluster.scheduler.state().ledger.trained == 4 * 16

    run_in_simulated_time(main())


def test_without_hosts_a_run_waits_and_goes_on_with_the_one_that_joins() -> None:
    async def main() -> None:
        cluster = Cluster()
        async with cluster.engine.batcher, cluster.scheduler:
            updating = asyncio.create_task(cluster.update())
            await asyncio.sleep(10)
            assert not updating.done()
            cluster.players.add("late", FarHost(cluster.engine, 3))
            await updating
            assert cluster.players.hosts == ("late",)

    run_in_simulated_time(main())


def test_a_host_ten_times_as_slow_gets_a_tenth_of_the_work() -> None:
    async def main() -> Counter[str]:
        cluster = Cluster(groups_per_update=8)
        hosts = {
            name: FarHost(cluster.engine, 8, mean_s)
            for name, mean_s in (("a", 0.1), ("b", 0.1), ("slow", 1.0))
        }
        for name, host in hosts.items():
            cluster.players.add(name, host)
        async with cluster.engine.batcher, cluster.scheduler:
            for _ in range(12):
                await cluster.update()
            assert cluster.players.metrics()["hosts/slow/slots"] == 1
        return Counter({name: host.num_played for name, host in hosts.items()})

    played = run_in_simulated_time(main())
    assert played["slow"] < 0.1 * played["a"]
    assert played["slow"] > 0


def test_a_host_with_old_weights_is_not_added() -> None:
    players = HostPlayers(3)
    engine = CountingEngine()
    with pytest.raises(ValueError, match="serves weight version 0, expected at least 3"):
        players.add("old", FarHost(engine))
    engine.weight_version = 3
    players.add("new", FarHost(engine))
    with pytest.raises(ValueError, match="drop it first"):
        players.add("new", FarHost(engine))


def test_decisions_of_a_host_that_is_gone_stay_counted() -> None:
    async def main() -> None:
        cluster = Cluster()
        cluster.players.add("a", FarHost(cluster.engine, 4))
        cluster.players.add("b", FarHost(cluster.engine, 4))
        clock = asyncio.get_running_loop().time
        async with cluster.engine.batcher, cluster.scheduler:
            await cluster.update()
            before = cluster.players.decisions(clock()).num_decisions
            cluster.players.drop("a")
            assert cluster.players.decisions(clock()).num_decisions >= before > 0

    run_in_simulated_time(main())
