"""Episodes over several hosts: the freest one runs the next, a lost one loses what it runs, a slow
one gets less.
"""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import msgspec
import pytest
from host_cluster import Cluster, RemoteHostRunner
from rollout_fakes import CountingEngine, fingerprint

from vla_rl.remote_rollout.episode_store import EpisodeStore
from vla_rl.remote_rollout.host_runner import HostEpisodeRunner
from vla_rl.rollout import EpisodeLost
from vla_rl.rollout.counts import MAX_HOST_LOSSES
from vla_rl.types import ImageCacheRef, Trajectory
from vla_rl.util.tasks import run_in_simulated_time

T = TypeVar("T")


def test_the_host_with_the_most_room_runs_the_next_episode() -> None:
    async def main() -> None:
        cluster = Cluster()
        small, large = RemoteHostRunner(cluster.engine, 2), RemoteHostRunner(cluster.engine, 6)
        cluster.runner.add_host("small", small)
        cluster.runner.add_host("large", large)
        async with cluster.engine.batcher, cluster.scheduler:
            assert cluster.runner.num_slots == 8
            for _ in range(5):
                await cluster.update()
            await asyncio.sleep(0)
            running = cluster.runner.metrics()
            assert running["hosts/small/episodes_running"] <= 2
            assert running["hosts/large/episodes_running"] <= 6
        assert large.num_run > 2 * small.num_run

    run_in_simulated_time(main())


def test_updates_go_on_while_weights_are_on_their_way_as_far_as_staleness_allows() -> None:
    async def main() -> None:
        cluster = Cluster()
        cluster.runner.add_host("far", RemoteHostRunner(cluster.engine, 8))
        async with cluster.engine.batcher, cluster.scheduler:
            first = [group async for group in cluster.scheduler.groups_for_update(0)]
            with pytest.raises(ValueError, match="publish the weights first"):
                cluster.scheduler.mark_trained(first, 1)
            cluster.runner.announce_version(1)
            cluster.scheduler.mark_trained(first, 1)
            second = [group async for group in cluster.scheduler.groups_for_update(1)]
            assert {group.dispatch_version for group in second} == {0}
            cluster.runner.announce_version(2)
            cluster.scheduler.mark_trained(second, 2)
            # the hosts still serve version 0, which an update to version 3 must not train on
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(1000.0):
                    await anext(cluster.scheduler.groups_for_update(2))
            assert cluster.scheduler.metrics()["rollout/depth/episodes_running"] == 0
            cluster.engine.weight_version = 2
            cluster.runner.mark_published(2)
            third = [group async for group in cluster.scheduler.groups_for_update(2)]
            assert {group.dispatch_version for group in third} == {2}

    run_in_simulated_time(main())


def test_a_lost_host_costs_its_running_episodes_which_run_again_elsewhere() -> None:
    async def main() -> None:
        cluster = Cluster()
        lost, stays = RemoteHostRunner(cluster.engine, 4), RemoteHostRunner(cluster.engine, 4)
        cluster.runner.add_host("lost", lost)
        cluster.runner.add_host("stays", stays)
        async with cluster.engine.batcher, cluster.scheduler:
            await cluster.update()
            lost.cut()
            cluster.runner.remove_host("lost")
            num_run = lost.num_run
            for _ in range(3):
                await cluster.update()
            assert lost.num_run == num_run
            assert 1 <= cluster.scheduler.metrics()["rollout/lost/died"] <= 4
            cluster.scheduler.check_conservation()
            assert cluster.scheduler.state().ledger.trained == 4 * 16

    run_in_simulated_time(main())


@asynccontextmanager
async def started(work: Coroutine[Any, Any, T]) -> AsyncIterator[asyncio.Task[T]]:
    """Begin work; on leaving, end it and take its outcome, so that no later test is told of it."""
    task = asyncio.create_task(work)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled():
            task.exception()


def run_over_hosts_that_die(num_deaths: int) -> None:
    """Run an update while one host after another joins and is lost with all that it runs."""

    async def main() -> None:
        cluster = Cluster(max_attempts=2)
        async with cluster.engine.batcher, cluster.scheduler, started(cluster.update()) as updating:
            for number in range(num_deaths):
                lost = RemoteHostRunner(cluster.engine, 4, mean_s=1000.0)
                cluster.runner.add_host(f"lost-{number}", lost)
                await asyncio.sleep(0.001)  # its episodes have begun, and none has ended
                assert lost.num_run == 0
                lost.cut()
                await asyncio.sleep(0.001)
            cluster.runner.add_host("stays", RemoteHostRunner(cluster.engine, 4))
            await updating

    run_in_simulated_time(main())


def test_an_episode_does_not_use_up_its_attempts_on_hosts_that_are_lost() -> None:
    run_over_hosts_that_die(num_deaths=MAX_HOST_LOSSES - 1)


def test_an_episode_that_may_be_what_ends_hosts_ends_the_run() -> None:
    with pytest.raises(EpisodeLost, match=r"host 'lost-9' is gone") as caught:
        run_over_hosts_that_die(num_deaths=MAX_HOST_LOSSES)
    assert caught.value.__notes__[0] == (
        "10 hosts were lost while they ran it, so it may be what ends them"
    )


def test_a_host_that_has_died_is_not_tried_again_before_its_end_is_reported() -> None:
    async def main() -> None:
        cluster = Cluster(max_attempts=2)
        lost, stays = RemoteHostRunner(cluster.engine, 4), RemoteHostRunner(cluster.engine, 4)
        cluster.runner.add_host("lost", lost)
        cluster.runner.add_host("stays", stays)
        async with cluster.engine.batcher, cluster.scheduler:
            await cluster.update()
            lost.cut()
            for _ in range(2):
                await cluster.update()
            assert cluster.runner.hosts == ("stays",)
            cluster.runner.remove_host("lost")

    run_in_simulated_time(main())


def test_without_hosts_a_run_waits_and_goes_on_with_the_one_that_joins() -> None:
    async def main() -> None:
        cluster = Cluster()
        async with cluster.engine.batcher, cluster.scheduler, started(cluster.update()) as updating:
            await asyncio.sleep(10)
            assert not updating.done()
            cluster.runner.add_host("late", RemoteHostRunner(cluster.engine, 3))
            await updating
            assert cluster.runner.hosts == ("late",)

    run_in_simulated_time(main())


def seconds_of_updates(*slowness: float) -> tuple[float, Cluster]:
    """Run ten updates over hosts of eight slots with this slowness each."""

    async def main() -> tuple[float, Cluster]:
        cluster = Cluster(groups_per_update=8)
        for number, factor in enumerate(slowness):
            host = RemoteHostRunner(cluster.engine, 8, 0.1)
            host.pool.slowness = factor
            cluster.runner.add_host(f"host{number}", host)
        async with cluster.engine.batcher, cluster.scheduler:
            for _ in range(10):
                await cluster.update()
            return asyncio.get_running_loop().time(), cluster

    return run_in_simulated_time(main())


def test_work_flows_around_a_host_that_is_ten_times_as_slow() -> None:
    without, _ = seconds_of_updates(1.0, 1.0)
    with_slow, cluster = seconds_of_updates(1.0, 1.0, 10.0)
    assert with_slow < 1.1 * without
    metrics = cluster.runner.metrics()
    assert metrics["hosts/host2/slots"] <= 2
    assert metrics["hosts/host2/episodes_overtaken"] > 0
    assert metrics["hosts/host0/slots"] == 8
    cluster.scheduler.check_conservation()


def test_a_host_that_is_slow_no_longer_gets_as_much_work_as_the_others() -> None:
    async def main() -> None:
        cluster = Cluster(groups_per_update=8)
        steady, recovering = (
            RemoteHostRunner(cluster.engine, 8, 0.1),
            RemoteHostRunner(cluster.engine, 8, 0.1),
        )
        recovering.pool.slowness = 10.0
        cluster.runner.add_host("steady", steady)
        cluster.runner.add_host("recovering", recovering)
        async with cluster.engine.batcher, cluster.scheduler:
            for _ in range(3):
                await cluster.update()
            assert cluster.runner.metrics()["hosts/recovering/slots"] <= 2
            recovering.pool.slowness = 1.0
            for _ in range(6):
                await cluster.update()
            assert cluster.runner.metrics()["hosts/recovering/slots"] == 8

    run_in_simulated_time(main())


def test_of_an_episode_on_two_hosts_one_end_counts_and_the_other_leaves_no_arrays() -> None:
    async def main() -> None:
        cluster = Cluster(groups_per_update=4)
        hosts = [
            RemoteHostRunner(cluster.engine, 4, 0.1, store=EpisodeStore(name, 1 << 20))
            for name in "ab"
        ]
        hosts[1].pool.slowness = 10.0
        for name, host in zip("ab", hosts, strict=True):
            cluster.runner.add_host(name, host)
        trained: list[int] = []
        async with cluster.engine.batcher, cluster.scheduler:
            for _ in range(6):
                groups = await cluster.update()
                trained += [each.episode.episode_id for g in groups for each in g.trajectories]
            assert cluster.runner.metrics()["hosts/b/episodes_overtaken"] > 0
        assert len(trained) == len(set(trained)) == 6 * 16
        # the rest is of groups that were not trained on
        assert sum(host.store.num_bytes for host in hosts) < 10_000
        running = cluster.runner.metrics()
        assert running["hosts/a/episodes_running"] == running["hosts/b/episodes_running"] == 0

    run_in_simulated_time(main())


def test_a_host_with_old_weights_is_not_added() -> None:
    runner = HostEpisodeRunner(3)
    engine = CountingEngine()
    with pytest.raises(ValueError, match="serves weight version 0, expected at least 3"):
        runner.add_host("old", RemoteHostRunner(engine))
    engine.weight_version = 3
    runner.add_host("new", RemoteHostRunner(engine))
    with pytest.raises(ValueError, match="remove it first"):
        runner.add_host("new", RemoteHostRunner(engine))


def test_decisions_of_a_host_that_is_gone_stay_counted() -> None:
    async def main() -> None:
        cluster = Cluster()
        cluster.runner.add_host("a", RemoteHostRunner(cluster.engine, 4))
        cluster.runner.add_host("b", RemoteHostRunner(cluster.engine, 4))
        clock = asyncio.get_running_loop().time
        async with cluster.engine.batcher, cluster.scheduler:
            await cluster.update()
            before = cluster.runner.decisions(clock()).num_decisions
            cluster.runner.remove_host("a")
            assert cluster.runner.decisions(clock()).num_decisions >= before > 0

    run_in_simulated_time(main())


def digests_over(stores: dict[str, EpisodeStore | None]) -> list[str]:
    """Three synchronous updates over hosts with these episode stores; the digest of each."""

    async def main() -> list[str]:
        cluster = Cluster(max_staleness=0, deterministic=True)
        for name, store in stores.items():
            cluster.runner.add_host(name, RemoteHostRunner(cluster.engine, 4, store=store))
        async with cluster.engine.batcher, cluster.scheduler:
            return [fingerprint(await cluster.update()) for _ in range(3)]

    return run_in_simulated_time(main())


def test_a_group_is_handed_over_whole_wherever_its_arrays_were() -> None:
    stores: dict[str, EpisodeStore | None] = {
        name: EpisodeStore(name, 1 << 20) for name in ("a", "b")
    }
    assert digests_over(stores) == digests_over({"here": None})
    # those of the next update's groups may have begun; none of a trained one is left
    assert all(store is not None and store.num_bytes < 10_000 for store in stores.values())


def test_arrays_of_filtered_groups_are_dropped_where_they_are() -> None:
    async def main() -> None:
        cluster = Cluster(keep=lambda group: group.group_id % 2 == 0)
        remote = RemoteHostRunner(cluster.engine, 4, store=EpisodeStore("far", 1 << 20))
        cluster.runner.add_host("far", remote)
        async with cluster.engine.batcher, cluster.scheduler:
            for _ in range(3):
                await cluster.update()
            assert remote.num_dropped == cluster.scheduler.state().ledger.filtered > 0

    run_in_simulated_time(main())


def test_arrays_that_are_lost_with_their_host_cost_a_replay_and_no_episode() -> None:
    async def main() -> None:
        cluster = Cluster(max_staleness=0)
        lost = RemoteHostRunner(cluster.engine, 3, store=EpisodeStore("lost", 1 << 20))
        stays = RemoteHostRunner(cluster.engine, 3, store=EpisodeStore("stays", 1 << 20))
        cluster.runner.add_host("lost", lost)
        cluster.runner.add_host("stays", stays)
        async with cluster.engine.batcher, cluster.scheduler:
            updating = asyncio.create_task(cluster.update())
            # long before a group of four is complete
            await lost.has_run.wait()
            lost.cut()
            cluster.runner.remove_host("lost")
            groups = await updating
            assert all(
                member.episode_ref is None for group in groups for member in group.trajectories
            )
            # what ran there, and what had ended there
            assert cluster.scheduler.metrics()["rollout/lost/died"] >= 3
            await cluster.update()
            cluster.scheduler.check_conservation()

    run_in_simulated_time(main())


class CachingHost(RemoteHostRunner):
    """A host whose images go to an image cache once their group is kept."""

    async def materialise(self, trajectory: Trajectory) -> Trajectory:
        materialised = await super().materialise(trajectory)
        assert trajectory.episode_ref is not None
        cached_images = ImageCacheRef(host="", key=trajectory.episode_ref.key, num_bytes=10)
        return msgspec.structs.replace(materialised, cached_images=cached_images)


def test_images_on_an_image_cache_are_dropped_once_their_group_was_trained() -> None:
    async def main() -> None:
        dropped: list[ImageCacheRef] = []
        cluster = Cluster(drop_images=dropped.append)
        cluster.runner.add_host(
            "far", CachingHost(cluster.engine, 4, store=EpisodeStore("far", 1 << 20))
        )
        trained: list[ImageCacheRef | None] = []
        async with cluster.engine.batcher, cluster.scheduler:
            for _ in range(3):
                groups = await cluster.update()
                trained += [
                    member.cached_images for group in groups for member in group.trajectories
                ]
                assert dropped == trained
                assert None not in trained
            cached_images = cluster.runner.metrics()["hosts/image_bytes_cached"]
            assert cached_images >= 10 * len(trained) == 10 * 3 * 16

    run_in_simulated_time(main())
