"""A player of this process: its engine may be behind the learner for a while."""

import asyncio
from collections.abc import Callable

import pytest
from rollout_fakes import CountingEngine, LatencyPool, source

from vla_rl.rollout import EpisodeScheduler, LocalEpisodeRunner, SchedulerConfig, embodied_agent
from vla_rl.rollout.policies import EngineTeam
from vla_rl.util.simulated_time import run_in_simulated_time


class Behind(CountingEngine):
    """It serves new weights once `serve` is called, like engines in processes of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.coming_version = 0
        self._calls: list[Callable[[], None]] = []
        self._has_arrived = asyncio.Event()

    def go_ahead(self) -> None: ...

    def when_served(self, call: Callable[[], None]) -> None:
        self._calls.append(call)

    async def arrive(self) -> None:
        await self._has_arrived.wait()

    def serve(self) -> None:
        self.weight_version = self.coming_version
        self._has_arrived.set()
        for call in self._calls:
            call()


def test_the_next_update_begins_before_the_engine_serves_the_weights_of_the_last_one() -> None:
    async def main() -> None:
        engine = Behind()
        player = LocalEpisodeRunner(LatencyPool(8), engine, embodied_agent)
        config = SchedulerConfig(groups_per_update=2, max_staleness=1)
        scheduler = EpisodeScheduler(player, source(), config)
        async with engine.batcher, scheduler:
            for update in (0, 1):
                groups = [group async for group in scheduler.groups_for_update(update)]
                assert {group.dispatch_version for group in groups} == {0}
                engine.coming_version = update + 1
                scheduler.trained(groups, update + 1)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(1000.0):
                    await anext(scheduler.groups_for_update(2))
            engine.serve()
            groups = [group async for group in scheduler.groups_for_update(2)]
            assert {group.dispatch_version for group in groups} == {2}

    run_in_simulated_time(main())


def test_a_team_is_as_far_behind_as_its_last_engine() -> None:
    async def main() -> None:
        ahead, behind = CountingEngine(), Behind()
        ahead.weight_version = behind.coming_version = 3
        team = EngineTeam({"left": ahead, "right": behind})
        assert (team.weight_version, team.coming_version) == (0, 3)
        arriving = asyncio.create_task(team.arrive())
        await asyncio.sleep(0)
        assert not arriving.done()
        behind.serve()
        await arriving
        assert (team.weight_version, team.coming_version) == (3, 3)

    run_in_simulated_time(main())
