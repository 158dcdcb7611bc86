"""Nodes that run other networks on episodes."""

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from small_episodes import PAIR, group_of

from vla_rl.learner import TrajectoryValues
from vla_rl.pipelines.nodes.run_parts import EstimateValues, ReferenceLogProbs, TrainCritic
from vla_rl.types import Trajectory

JUDGED = [
    [
        TrajectoryValues(np.array([0.5, 0.25], np.float32), 0.0),
        TrajectoryValues(np.zeros(1, np.float32), 1.0),
    ]
]
RETURNS = [np.array([7.0, 4.0], np.float32), np.array([0.5], np.float32)]


class Network:
    """A critic and a reference in one, whose update ends when the test lets it."""

    def __init__(self) -> None:
        self.began, self.may_end = asyncio.Event(), asyncio.Event()
        self.learnt: list[tuple[Any, ...]] = []

    async def values(self, trajectories: Sequence[Trajectory]) -> list[TrajectoryValues]:
        return [
            TrajectoryValues(np.full(len(each.steps), 0.5, np.float32), 0.0)
            for each in trajectories
        ]

    async def log_probs(self, trajectories: Sequence[Trajectory]) -> list[list[np.ndarray]]:
        return [[np.zeros(2, np.float32) for _ in each.steps] for each in trajectories]

    async def update(
        self, trajectories: Any, judged: Any, returns: Any, *, number: int
    ) -> dict[str, float]:
        self.began.set()
        await self.may_end.wait()
        self.learnt.append((trajectories, judged, returns, number))
        return {"critic/loss": 2.0}


async def test_values_and_log_probs_are_those_of_the_groups_episodes() -> None:
    network = Network()
    judged = await EstimateValues(network)(PAIR)  # type: ignore[arg-type]
    assert [len(each.values) for each in judged] == [2, 1]
    log_probs = await ReferenceLogProbs(network)(PAIR)  # type: ignore[arg-type]
    assert [len(of_episode) for of_episode in log_probs] == [2, 1]


async def test_the_critic_learns_from_all_groups_in_order_and_only_metrics_are_written() -> None:
    network = Network()
    network.may_end.set()
    groups = [PAIR, group_of(*PAIR.trajectories[:1])]
    judged = [*JUDGED, JUDGED[0][:1]]
    output = await TrainCritic(network)(3, groups, judged, RETURNS)  # type: ignore[arg-type]
    ((trajectories, flat, returns, number),) = network.learnt
    assert trajectories == [*PAIR.trajectories, PAIR.trajectories[0]]
    assert [each is same for each, same in zip(flat, [*judged[0], *judged[1]], strict=True)] == [
        True
    ] * 3
    assert (returns, number) == (RETURNS, 3)
    assert (output.values, output.metrics) == ({}, {"critic/loss": 2.0})


async def test_an_update_of_the_critic_that_has_begun_ends_before_its_cancellation_counts() -> None:
    network = Network()
    learn = TrainCritic(network)  # type: ignore[arg-type]
    async with asyncio.timeout(10):
        task = asyncio.create_task(learn(3, [PAIR], JUDGED, RETURNS), name="learn")  # type: ignore[arg-type]
        await network.began.wait()
        task.cancel()
        network.may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert len(network.learnt) == 1
