"""Saving a scheduler at any instant and going on: no start lost, none given out twice, and the same
training input.
"""

import asyncio
from collections import Counter
from typing import Any

import msgspec
import numpy as np
import pytest
from rollout_fakes import CountingEngine, LatencyPool, fingerprint, source

from vla_rl.errors import ConfigError
from vla_rl.rollout import (
    EpisodeScheduler,
    LocalEpisodeRunner,
    SchedulerConfig,
    SchedulerState,
    embodied_agent,
)
from vla_rl.types import Group
from vla_rl.util.tasks import run_in_simulated_time


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
