"""Starts are given out in groups of alike members, by whole epochs, also after a resume.

A scheduler is saved at any instant: no start is lost, none is given out twice, and the training input is
the same.
"""

import asyncio
from collections import Counter
from typing import Any

import msgspec
import numpy as np
import pytest
from rollout_fakes import CountingEngine, LatencyPool, fingerprint, source, starts

from vla_rl.errors import ConfigError
from vla_rl.rollout import (
    EpisodeScheduler,
    GroupSource,
    LocalEpisodeRunner,
    SchedulerConfig,
    SchedulerState,
    SourceState,
    TaskStart,
    embodied_agent,
)
from vla_rl.types import EnvSpec, Group, Sampling
from vla_rl.util.tasks import run_in_simulated_time


def test_members_of_a_group_start_alike_and_decide_differently() -> None:
    plan = GroupSource(starts(3), 4, seed=7, sampling=Sampling(temperature=1.6)).next_group()
    assert [episode.member for episode in plan.episodes] == [0, 1, 2, 3]
    assert [episode.episode_id for episode in plan.episodes] == [0, 1, 2, 3]
    alike = {
        (episode.task, episode.seed, episode.env.id, str(episode.options))
        for episode in plan.episodes
    }
    assert len(alike) == 1
    assert len({episode.policy_seed for episode in plan.episodes}) == 4
    assert all(episode.sampling.temperature == 1.6 for episode in plan.episodes)


def test_the_last_members_of_a_group_may_act_greedily_as_a_baseline() -> None:
    plan = GroupSource(
        starts(1), 3, seed=7, sampling=Sampling(temperature=1.6), num_greedy=1
    ).next_group()
    assert [episode.sampling.greedy for episode in plan.episodes] == [False, False, True]
    assert all(episode.sampling.temperature == 1.6 for episode in plan.episodes)


def test_after_n_epochs_every_start_was_given_out_n_times() -> None:
    groups = source(count=7)
    seen = Counter(groups.next_group().start_index for _ in range(21))
    assert seen == dict.fromkeys(range(7), 3)
    assert groups.epoch == 3


def test_epochs_are_shuffled_differently_and_the_same_for_the_same_seed() -> None:
    def two_epochs(seed: int) -> list[int]:
        groups = source(count=20, seed=seed)
        return [groups.next_group().start_index for _ in range(40)]

    assert two_epochs(1) == two_epochs(1)
    assert two_epochs(1) != two_epochs(2)
    assert two_epochs(1)[:20] != two_epochs(1)[20:]


def test_a_lost_start_comes_back_before_anything_else_every_time() -> None:
    groups = source(count=5)
    lost = groups.next_group()
    groups.next_group()
    groups.return_start(lost)
    again = groups.next_group()
    assert (again.start_index, again.group_id) == (lost.start_index, 2)
    groups.return_start(again)
    assert groups.next_group().start_index == lost.start_index
    rest = Counter(groups.next_group().start_index for _ in range(3))
    assert lost.start_index not in rest
    assert groups.epoch == 1


def test_a_restored_source_goes_on_where_it_was() -> None:
    groups = source(count=4)
    for _ in range(3):
        plan = groups.next_group()
    groups.return_start(plan)
    saved = msgspec.json.decode(msgspec.json.encode(groups.state()), type=SourceState)
    other = source(count=4)
    other.restore(saved)
    assert [other.next_group() for _ in range(10)] == [groups.next_group() for _ in range(10)]


def test_a_cursor_of_other_starts_is_refused() -> None:
    saved = source(count=4).state()
    with pytest.raises(ConfigError, match="it was saved with num_starts 4, now 5; starts_digest"):
        source(count=5).restore(saved)


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (GroupSource(starts(4), 8, 0), "group_size 4, now 8. Resume"),
        (GroupSource(starts(4), 4, 0, num_greedy=1), "num_greedy 0, now 1. Resume"),
        (GroupSource(starts(4), 4, 1), "seed 0, now 1. Resume"),
        (GroupSource(starts(5)[1:], 4, 0), "starts_digest"),
        (GroupSource(starts(4), 4, 0, kinds=["a", "b", "a", "b"]), "starts_digest"),
    ],
)
def test_a_cursor_of_a_source_that_gives_out_other_groups_is_refused_and_the_difference_named(
    other: GroupSource, named: str
) -> None:
    saved = GroupSource(starts(4), 4, 0).state()
    with pytest.raises(
        ConfigError, match="hands out other groups than this run would: it was saved with " + named
    ):
        other.restore(saved)


def test_a_cursor_is_read_where_the_files_of_the_environment_have_moved() -> None:
    moved = [
        msgspec.structs.replace(start, env=EnvSpec(id="fake-v0", kwargs={"assets": "elsewhere"}))
        for start in starts(4)
    ]
    GroupSource(moved, 4, 0).restore(GroupSource(starts(4), 4, 0).state())


def test_a_cursor_that_was_saved_before_it_named_its_source_is_still_read() -> None:
    older = b'{"num_starts":4,"epoch":1,"position":2,"next_group_id":6,"returned":[[3,1]]}'
    groups = GroupSource(starts(4), 8, 5)
    groups.restore(msgspec.json.decode(older, type=SourceState))
    plan = groups.next_group()
    assert (plan.start_index, plan.group_id, groups.epoch) == (3, 6, 1)


def test_a_source_without_starts_is_refused() -> None:
    with pytest.raises(ConfigError, match="there are no starts"):
        GroupSource([], 4, 0)


def test_kinds_take_turns_as_evenly_as_their_numbers_allow() -> None:
    kinds = ["robot"] * 2 + ["text"] * 6
    mixed = GroupSource(starts(8), 1, seed=3, kinds=kinds)
    given = [mixed.next_group().start_index for _ in range(16)]
    assert ["robot" if start < 2 else "text" for start in given] == 4 * [
        "text",
        "robot",
        "text",
        "text",
    ]
    assert sorted(given[:8]) == sorted(given[8:]) == list(range(8))
    assert given[:8] != given[8:]  # each kind is shuffled


def test_kinds_that_do_not_fit_the_starts_are_refused() -> None:
    with pytest.raises(ConfigError, match="1 kinds for 2 starts"):
        GroupSource(starts(2), 1, seed=0, kinds=["text"])


def test_a_cursor_tells_starts_apart_whatever_their_options_are() -> None:
    def of(options: dict[Any, Any]) -> GroupSource:
        start = TaskStart(env=EnvSpec(id="none"), task="none", options=options)
        return GroupSource([start], group_size=2, seed=0)

    long = np.arange(5000)
    other = long.copy()
    other[2500] = 0
    for mine, another in (
        ({"state": long}, {"state": other}),
        ({"by": {1: "a"}}, {"by": {1: "b"}}),
    ):
        of(mine).restore(of(mine).state())
        with pytest.raises(ConfigError, match="starts_digest"):
            of(mine).restore(of(another).state())


def through_bytes(state: SchedulerState) -> SchedulerState:
    """The state as it is after having been on disk.

    Arrays are all that msgspec has to be told about.
    """

    def encode(value: Any) -> msgspec.msgpack.Ext:
        assert isinstance(value, np.ndarray)
        head = msgspec.msgpack.encode((value.dtype.str, value.shape))
        return msgspec.msgpack.Ext(1, bytes([len(head)]) + head + value.tobytes())

    def decode(code: int, data: memoryview) -> np.ndarray:
        end = 1 + data[0]
        dtype, shape = msgspec.msgpack.decode(data[1:end])
        return np.frombuffer(bytes(data[end:]), dtype).reshape(shape)

    return msgspec.msgpack.decode(
        msgspec.msgpack.encode(state, enc_hook=encode), type=SchedulerState, ext_hook=decode
    )


class Run:
    """Training that can be broken off after some simulated time and gone on with from what was
    saved.
    """

    def __init__(
        self, *, num_envs: int = 5, saved: SchedulerState | None = None, **settings: object
    ) -> None:
        self.engine = CountingEngine(deterministic=True)
        self.pool = LatencyPool(num_envs, seed=num_envs)
        config = SchedulerConfig(
            **{"groups_per_update": 2, "max_staleness": 0, "deterministic": True, **settings}
        )
        self.scheduler = EpisodeScheduler(
            LocalEpisodeRunner(self.pool, self.engine, embodied_agent),
            source(7),
            config,
            keep=lambda group: group.group_id % 4 != 1,
        )
        if saved is not None:
            self.scheduler.restore(saved)
            self.engine.weight_version = saved.version
        self.digests: list[str] = []
        self.trained: list[Group] = []

    async def train(self, until_version: int) -> None:
        async with self.engine.batcher, self.scheduler:
            while self.scheduler.version < until_version:
                update = self.scheduler.version
                groups = [group async for group in self.scheduler.groups_for_update(update)]
                self.engine.weight_version = update + 1
                self.scheduler.mark_trained(groups, update + 1)
                self.digests.append(fingerprint(groups))
                self.trained += groups

    async def train_for(self, seconds: float) -> SchedulerState:
        try:
            async with asyncio.timeout(seconds):
                await self.train(1_000)
        except TimeoutError:
            return through_bytes(self.scheduler.state())
        raise AssertionError("was to be broken off")


@pytest.mark.parametrize(
    "seconds",
    [0.05, 0.77, 3.1, *(pytest.param(each, marks=pytest.mark.proof) for each in (0.0, 0.3, 1.5))],
)
def test_a_resumed_run_trains_on_what_an_uninterrupted_one_would_have(seconds: float) -> None:
    async def uninterrupted() -> list[str]:
        run = Run()
        await run.train(12)
        return run.digests

    async def interrupted() -> list[str]:
        first = Run()
        second = Run(num_envs=3, saved=await first.train_for(seconds))
        third = Run(num_envs=8, saved=await second.train_for(seconds + 0.1))
        await third.train(12)
        return first.digests + second.digests + third.digests

    assert run_in_simulated_time(interrupted()) == run_in_simulated_time(uninterrupted())


@pytest.mark.parametrize("seconds", [0.2, 0.9, 2.0])
def test_no_start_is_lost_by_a_resume_and_none_is_run_twice(seconds: float) -> None:
    async def main() -> None:
        settings = {"max_staleness": 2, "deterministic": False}
        first = Run(**settings)
        saved = await first.train_for(seconds)
        second = Run(saved=saved, **settings)
        await second.train(saved.version + 20)
        state = second.scheduler.state()
        ids = Counter(group.group_id for group in first.trained + second.trained)
        assert set(ids.values()) == {1}
        outstanding = {group.plan.group_id for group in state.groups}
        filtered = set(range(1, state.source.next_group_id, 4))
        assert sorted(ids.keys() | outstanding | filtered) == list(
            range(state.source.next_group_id)
        )

    run_in_simulated_time(main())


def test_members_that_were_run_before_the_save_are_not_run_again() -> None:
    async def main() -> None:
        first = Run(num_envs=3)
        saved = await first.train_for(1.0)
        count_finished = sum(len(group.trajectories) for group in saved.groups)
        num_missing = sum(
            len(group.plan.episodes) - len(group.trajectories) for group in saved.groups
        )
        assert count_finished > 0
        assert num_missing > 0
        second = Run(num_envs=3, saved=saved)
        await second.train(saved.version + 1)
        num_added = second.scheduler.state().source.next_group_id - saved.source.next_group_id
        assert second.pool.num_leases <= num_missing + 4 * num_added

    run_in_simulated_time(main())


def test_going_on_with_less_staleness_drops_what_is_too_old_and_gives_its_starts_back() -> None:
    async def main() -> None:
        first = Run(max_staleness=4, deterministic=False)
        saved = await first.train_for(1.0)
        old = {group.plan.group_id: group.plan.start_index for group in saved.groups}
        second = Run(saved=saved)
        state = second.scheduler.state()
        assert sum(state.ledger.dropped.values()) == state.ledger.dropped["stale"] > 0
        gone = old.keys() - {group.plan.group_id for group in state.groups}
        assert state.ledger.dropped["stale"] == 4 * len(gone)
        assert sorted(start.start_index for start in state.source.returned) == sorted(
            old[g] for g in gone
        )
        assert all(group.dispatch_version == state.version for group in state.groups)
        await second.train(saved.version + 5)

    run_in_simulated_time(main())


def test_an_open_scheduler_cannot_be_restored() -> None:
    async def main() -> None:
        run = Run()
        async with run.engine.batcher, run.scheduler:
            with pytest.raises(RuntimeError, match="before it is opened"):
                run.scheduler.restore(run.scheduler.state())

    run_in_simulated_time(main())


def test_the_state_of_other_starts_is_refused() -> None:
    saved = Run().scheduler.state()
    config = SchedulerConfig(groups_per_update=2, max_staleness=0)
    runner = LocalEpisodeRunner(LatencyPool(2), CountingEngine(), embodied_agent)
    other = EpisodeScheduler(runner, source(8), config)
    with pytest.raises(ConfigError, match="num_starts 7, now 8"):
        other.restore(saved)
