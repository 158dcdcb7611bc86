"""A resume with members whose arrays are in the depots of other hosts: kept, fetched, or run again."""

import asyncio

from far_hosts import FarHost
from host_cluster import Cluster

from vla_rl.remote_rollout.episode_store import EpisodeStore
from vla_rl.util.simulated_time import run_in_simulated_time


def resumed_with(depot_stays: bool) -> tuple[int, int]:
    """Save with some members in a host's depot, and resume; return how many were kept and replayed."""

    async def main() -> tuple[int, int]:
        killed, depot = Cluster(max_staleness=0), EpisodeStore("far", 1 << 20)
        far = FarHost(killed.engine, 3, depot=depot)
        killed.players.add("far", far)
        async with killed.engine.batcher, killed.scheduler:
            while not killed.scheduler.deposits():  # noqa: ASYNC110 - in simulated time
                await asyncio.sleep(0.001)
        state = killed.scheduler.state()
        light = [each for group in state.groups for each in group.trajectories]
        keys = tuple(each.deposit.key for each in light if each.deposit is not None)
        assert len(keys) == len(light) >= 1
        resumed = Cluster(max_staleness=0)
        left = depot if depot_stays else EpisodeStore("far", 1 << 20)
        again = FarHost(resumed.engine, 3, depot=left, kept=keys)
        resumed.players.add("far", again)
        resumed.scheduler.restore(state)
        assert {place.key for place in resumed.scheduler.deposits()} == set(keys)
        async with resumed.engine.batcher, resumed.scheduler:
            groups = await resumed.update()
            resumed.scheduler.check_conservation()
            # none of them was lost by the run that resumes
            assert resumed.scheduler.metrics().get("rollout/lost/died", 0.0) == 0
        members = [each for group in groups for each in group.trajectories]
        assert all(each.deposit is None for each in members)
        kept = {each.episode.episode_id for each in light}
        return len(kept), again.num_played - (len(members) - len(kept))

    return run_in_simulated_time(main())


def test_members_in_a_depot_that_stayed_are_not_run_again_after_a_resume() -> None:
    num_kept, num_replayed = resumed_with(depot_stays=True)
    assert num_kept >= 1
    assert num_replayed == 0


def test_members_whose_depot_is_gone_are_run_again_after_a_resume() -> None:
    num_kept, num_replayed = resumed_with(depot_stays=False)
    assert num_kept == num_replayed


def test_a_group_that_was_on_its_way_here_is_fetched_after_a_resume() -> None:
    async def main() -> None:
        killed, depot = Cluster(max_staleness=0), EpisodeStore("far", 1 << 20)
        far = FarHost(killed.engine, 4, depot=depot)
        far.is_slow_to_send = True
        killed.players.add("far", far)
        async with killed.engine.batcher, killed.scheduler:
            await far.is_asked_for_arrays.wait()
        state = killed.scheduler.state()
        complete = [group for group in state.groups if group.is_complete]
        assert complete
        assert all(each.deposit is not None for each in complete[0].trajectories)
        resumed = Cluster(max_staleness=0)
        keys = tuple(place.key for place in killed.scheduler.deposits())
        again = FarHost(resumed.engine, 4, depot=depot, kept=keys)
        resumed.players.add("far", again)
        resumed.scheduler.restore(state)
        async with resumed.engine.batcher, resumed.scheduler:
            groups = await resumed.update()
        ids = [each.episode.episode_id for group in groups for each in group.trajectories]
        assert len(set(ids)) == len(ids)

    run_in_simulated_time(main())
