"""An episode store keeps arrays where they were made, gives them back as they were, also after a resume."""

import asyncio

import msgspec
import numpy as np
from host_cluster import Cluster, RemoteHostRunner
from rollout_fakes import source

from vla_rl.remote_rollout.episode_store import EpisodeStore, materialise, split_arrays
from vla_rl.types import ActionChunk, Step, StopReason, Trajectory
from vla_rl.util.tasks import run_in_simulated_time


def trajectory(num_steps: int = 3) -> Trajectory:
    random = np.random.default_rng(0)

    def step(number: int) -> Step:
        return Step(
            observation={
                "image": random.integers(0, 255, (32, 32, 3), np.uint8),
                "state": random.random(3, np.float32),
                "a/b": random.random(400, np.float32),
                "instruction": "go",
            },
            chunk=ActionChunk(
                actions=random.random((4, 2), np.float32),
                tokens=random.integers(0, 9, 8),
                log_probs=-random.random(8, np.float32),
                weight_version=number,
                weight_versions=np.full(8, number) if number else None,
                temperature=0.5,
                drawn={
                    "state_before": random.random((50, 4), np.float32),
                    "step": np.array(number),
                    "a/b": random.random(300, np.float32),
                }
                if number == 2
                else None,
            ),
            rewards=np.array([0.0, number], np.float32),
            frames=random.integers(0, 255, (2, 8, 8, 3), np.uint8) if number == 1 else None,
            frames_key="image" if number == 1 else None,
            intervened=np.array([False, True]) if number == 1 else None,
            expert_actions=random.random((4, 2), np.float32) if number == 1 else None,
        )

    return Trajectory(
        episode=source(1).next_group().episodes[0],
        steps=tuple(step(number) for number in range(num_steps)),
        final_observation={"instruction": "go", "image": np.ones((32, 32, 3), np.uint8)},
        stop_reason=StopReason.SUCCESS,
        info={"is_success": True},
    )


def as_bytes(value: object) -> bytes:
    def plain(array: np.ndarray) -> list[object]:
        return [str(array.dtype), array.shape, array.tobytes()]

    return msgspec.msgpack.encode(value, enc_hook=plain)


def test_a_trajectory_made_whole_again_is_the_same_to_the_last_byte() -> None:
    before = trajectory()
    metadata, arrays = split_arrays(before)
    assert as_bytes(materialise(metadata, arrays)) == as_bytes(before)


def test_what_filters_and_counts_need_stays_in_the_light_one() -> None:
    before = trajectory()
    metadata, _ = split_arrays(before)
    for name in ("is_success", "is_success_known", "num_env_steps", "undiscounted_return"):
        assert getattr(metadata, name) == getattr(before, name)
    assert metadata.oldest_version == before.oldest_version
    assert metadata.steps[0].observation["instruction"] == "go"


def test_a_light_episode_of_64_decisions_is_under_20_kilobytes() -> None:
    metadata, arrays = split_arrays(trajectory(64))
    # "a/b" stays in place, because "/" divides places
    steps = tuple(
        msgspec.structs.replace(step, observation={**step.observation, "a/b": None})
        for step in metadata.steps
    )
    assert len(as_bytes(msgspec.structs.replace(metadata, steps=steps))) < 20_000
    assert sum(array.nbytes for array in arrays.values()) > 64 * 3072


def test_arrays_are_handed_over_once() -> None:
    store, before = EpisodeStore("a", 1 << 20), trajectory()
    metadata = store.put_arrays(before)
    assert metadata.episode_ref is not None
    assert metadata.episode_ref.num_bytes == store.num_bytes > 3 * 3072
    arrays = store.take_arrays(metadata.episode_ref.key)
    assert arrays is not None
    assert as_bytes(materialise(metadata, arrays)) == as_bytes(before)
    assert store.num_bytes == 0
    assert store.take_arrays(metadata.episode_ref.key) is None
    store.drop_episode(metadata.episode_ref.key)


def test_an_episode_without_room_is_handed_over_whole() -> None:
    num_bytes = sum(array.nbytes for array in split_arrays(trajectory())[1].values())
    store = EpisodeStore("a", num_bytes + 10)
    first, second = store.put_arrays(trajectory()), store.put_arrays(trajectory())
    assert first.episode_ref is not None
    assert second.episode_ref is None
    assert as_bytes(second) == as_bytes(trajectory())
    store.drop_episode(first.episode_ref.key)
    assert store.put_arrays(trajectory()).episode_ref is not None


def test_keys_of_another_process_on_the_same_host_are_unknown() -> None:
    one, other = EpisodeStore("a", 1 << 20), EpisodeStore("a", 1 << 20)
    metadata = one.put_arrays(trajectory())
    other.put_arrays(trajectory())
    assert metadata.episode_ref is not None
    assert other.take_arrays(metadata.episode_ref.key) is None


def resumed_with(store_stays: bool) -> tuple[int, int]:
    """Save with some members in a host's episode store, and resume; return how many were kept and replayed."""

    async def main() -> tuple[int, int]:
        killed, store = Cluster(max_staleness=0), EpisodeStore("far", 1 << 20)
        host = RemoteHostRunner(killed.engine, 3, store=store)
        killed.runner.add_host("far", host)
        async with killed.engine.batcher, killed.scheduler:
            while not killed.scheduler.episode_refs():  # noqa: ASYNC110 - in simulated time
                await asyncio.sleep(0.001)
        state = killed.scheduler.state()
        metadata = [each for group in state.groups for each in group.trajectories]
        keys = tuple(each.episode_ref.key for each in metadata if each.episode_ref is not None)
        assert len(keys) == len(metadata) >= 1
        resumed = Cluster(max_staleness=0)
        left = store if store_stays else EpisodeStore("far", 1 << 20)
        again = RemoteHostRunner(resumed.engine, 3, store=left, kept=keys)
        resumed.runner.add_host("far", again)
        resumed.scheduler.restore(state)
        assert {reference.key for reference in resumed.scheduler.episode_refs()} == set(keys)
        async with resumed.engine.batcher, resumed.scheduler:
            groups = await resumed.update()
            resumed.scheduler.check_conservation()
            # none of them was lost by the run that resumes
            assert resumed.scheduler.metrics().get("rollout/lost/died", 0.0) == 0
        members = [each for group in groups for each in group.trajectories]
        assert all(each.episode_ref is None for each in members)
        kept = {each.episode.episode_id for each in metadata}
        return len(kept), again.num_run - (len(members) - len(kept))

    return run_in_simulated_time(main())


def test_members_in_an_episode_store_that_stayed_are_not_run_again_after_a_resume() -> None:
    num_kept, num_replayed = resumed_with(store_stays=True)
    assert num_kept >= 1
    assert num_replayed == 0


def test_members_whose_episode_store_is_gone_are_run_again_after_a_resume() -> None:
    num_kept, num_replayed = resumed_with(store_stays=False)
    assert num_kept == num_replayed


def test_a_group_that_was_on_its_way_here_is_fetched_after_a_resume() -> None:
    async def main() -> None:
        killed, store = Cluster(max_staleness=0), EpisodeStore("far", 1 << 20)
        host = RemoteHostRunner(killed.engine, 4, store=store)
        host.is_slow_to_send = True
        killed.runner.add_host("far", host)
        async with killed.engine.batcher, killed.scheduler:
            await host.is_asked_for_arrays.wait()
        state = killed.scheduler.state()
        complete = [group for group in state.groups if group.is_complete]
        assert complete
        assert all(each.episode_ref is not None for each in complete[0].trajectories)
        resumed = Cluster(max_staleness=0)
        keys = tuple(reference.key for reference in killed.scheduler.episode_refs())
        again = RemoteHostRunner(resumed.engine, 4, store=store, kept=keys)
        resumed.runner.add_host("far", again)
        resumed.scheduler.restore(state)
        async with resumed.engine.batcher, resumed.scheduler:
            groups = await resumed.update()
        ids = [each.episode.episode_id for group in groups for each in group.trajectories]
        assert len(set(ids)) == len(ids)

    run_in_simulated_time(main())
