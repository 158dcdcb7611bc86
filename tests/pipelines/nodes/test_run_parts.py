"""Nodes that call parts of the run: collect, estimate values, update, save, show."""

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from small_episodes import PAIR, SILENT, as_greedy, make_group, shared, trajectory

from vla_rl.errors import EnvError
from vla_rl.graph.update import WrongInput
from vla_rl.learner import TrajectoryValues
from vla_rl.learner.learner import UpdateReport
from vla_rl.pipelines.config import FilterConfig
from vla_rl.pipelines.nodes.run_parts import (
    EstimateValues,
    Learn,
    ReferenceLogProbs,
    Save,
    Show,
    TrainCritic,
    select_episodes,
)
from vla_rl.run.parts import group_filter
from vla_rl.types import Group, StopReason, Trajectory


class CountedUpdates:
    """A learner that only counts its updates, and notes what each learned from."""

    def __init__(self) -> None:
        self.weight_version = 0
        self.learned: list[tuple[list[int], list[float], Any]] = []
        self.started = asyncio.Event()
        self.may_end: asyncio.Event | None = None

    async def update(
        self, trajectories: Sequence[Trajectory], advantages: Sequence[float], references: Any
    ) -> UpdateReport:
        numbers = [each.episode.episode_id for each in trajectories]
        self.learned.append((numbers, [float(each) for each in advantages], references))
        self.started.set()
        if self.may_end is not None:
            await self.may_end.wait()
        return await self.publish_unchanged()

    async def publish_unchanged(self) -> UpdateReport:
        self.weight_version += 1
        return UpdateReport(weight_version=self.weight_version, metrics={"update/trained": 1.0})


class Ledger:
    """A scheduler that only notes which groups were trained on."""

    def __init__(self) -> None:
        self.version = 0
        self.groups: list[Sequence[Group]] = []

    def mark_trained(self, groups: Sequence[Group], version: int) -> None:
        self.groups.append(groups)
        self.version = version


async def the_state() -> str:
    return "the state"


def learn(
    learner: Any, ledger: Any, *, mask_truncated: bool = False, warmup: int = 0, every: int = 1
) -> Learn:
    return Learn(
        learner,
        ledger,
        mask_truncated=mask_truncated,
        warmup_updates=lambda: warmup,
        snapshot=the_state,
        is_due=lambda version: version % every == 0,
    )


async def test_an_update_has_every_episode_with_its_advantage_and_is_noted_once() -> None:
    learner, ledger = CountedUpdates(), Ledger()
    node = learn(learner, ledger, every=2)
    made = await node([PAIR], np.array([0.5, -0.5]), [["first", "second"]])
    assert learner.learned == [([0, 1], [0.5, -0.5], ["first", "second"])]
    assert (ledger.groups, ledger.version) == ([[PAIR]], 1)
    assert made.values == {"snapshot": None}
    assert made.metrics == {"update/trained": 1.0}
    assert node.is_between_updates
    assert (await node([PAIR], [0.5, -0.5])).values == {"snapshot": "the state"}


async def test_episodes_that_are_not_learned_from_take_their_references_along() -> None:
    learner = CountedUpdates()
    groups = [
        make_group(trajectory([[1.0]], 0), trajectory([[0.0]], 1, StopReason.TIME_LIMIT)),
        make_group(as_greedy(trajectory([[1.0]], 2)), trajectory([[1.0]], 3)),
    ]
    await learn(learner, Ledger(), mask_truncated=True)(
        groups, [1.0, 2.0, 3.0, 4.0], [["a", "b"], ["c", "d"]]
    )
    assert learner.learned == [([0, 3], [1.0, 4.0], ["a", "d"])]


async def test_an_update_without_an_episode_counts_and_changes_nothing() -> None:
    learner, ledger = CountedUpdates(), Ledger()
    cut = make_group(trajectory([[0.0]], 0, StopReason.TIME_LIMIT))
    await learn(learner, ledger, mask_truncated=True)([cut], [1.0])
    assert not learner.learned
    assert (ledger.version, ledger.groups) == (1, [[cut]])


async def test_the_policy_stands_still_while_its_critic_warms_up() -> None:
    learner = CountedUpdates()
    node = learn(learner, Ledger(), warmup=2)
    for _ in range(3):
        await node([PAIR], [0.5, -0.5])
    assert len(learner.learned) == 1
    assert learner.weight_version == 3


async def test_advantages_that_are_not_one_for_each_episode_are_refused() -> None:
    learner = CountedUpdates()
    with pytest.raises(WrongInput, match="there are 1, expected 2, one for each episode"):
        await learn(learner, Ledger())([PAIR], [0.5])
    assert not learner.learned


async def test_a_cancelled_update_is_completed_before_the_cancellation_goes_on() -> None:
    learner, ledger = CountedUpdates(), Ledger()
    learner.may_end = asyncio.Event()
    node = learn(learner, ledger)
    async with asyncio.timeout(5):
        task = asyncio.ensure_future(node([PAIR], [0.5, -0.5]))
        await learner.started.wait()
        assert not node.is_between_updates
        task.cancel()
        await asyncio.sleep(0)
        learner.may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert (ledger.version, learner.weight_version) == (1, 1)
    assert node.is_between_updates


async def test_after_an_update_that_failed_nothing_is_between_updates() -> None:
    class Failing(CountedUpdates):
        async def update(self, *arguments: Any) -> UpdateReport:
            raise RuntimeError("half of the weights are new")

    node = learn(Failing(), Ledger())
    with pytest.raises(RuntimeError, match="half of the weights"):
        await node([PAIR], [0.5, -0.5])
    assert not node.is_between_updates


async def test_only_a_snapshot_that_is_there_is_saved() -> None:
    saved: list[Any] = []

    async def prepare(snapshot: Any) -> None:
        saved.append(snapshot)

    await Save(prepare)(None)
    await Save(prepare)("the state")
    assert saved == ["the state"]


async def test_all_episodes_of_an_update_are_offered_to_the_recorder_if_there_is_one() -> None:
    show, offered = Show(), []
    await show(3, [PAIR])
    show.offer = lambda update, members: offered.append((update, len(members)))
    await show(4, [PAIR, PAIR])
    assert offered == [(4, 4)]


VALUES = [
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

    async def fit_values(
        self, trajectories: Any, values: Any, returns: Any, *, number: int
    ) -> dict[str, float]:
        self.began.set()
        await self.may_end.wait()
        self.learnt.append((trajectories, values, returns, number))
        return {"critic/loss": 2.0}


async def test_values_and_log_probs_are_those_of_the_groups_episodes() -> None:
    network = Network()
    values = await EstimateValues(network)(PAIR)  # type: ignore[arg-type]
    assert [len(each.values) for each in values] == [2, 1]
    log_probs = await ReferenceLogProbs(network)(PAIR)  # type: ignore[arg-type]
    assert [len(of_episode) for of_episode in log_probs] == [2, 1]


async def test_the_critic_learns_from_all_groups_in_order_and_only_metrics_are_written() -> None:
    network = Network()
    network.may_end.set()
    groups = [PAIR, make_group(*PAIR.trajectories[:1])]
    values = [*VALUES, VALUES[0][:1]]
    output = await TrainCritic(network)(3, groups, values, RETURNS)  # type: ignore[arg-type]
    ((trajectories, flat, returns, number),) = network.learnt
    assert trajectories == [*PAIR.trajectories, PAIR.trajectories[0]]
    assert [each is same for each, same in zip(flat, [*values[0], *values[1]], strict=True)] == [
        True
    ] * 3
    assert (returns, number) == (RETURNS, 3)
    assert (output.values, output.metrics) == ({}, {"critic/loss": 2.0})


async def test_an_update_of_the_critic_that_has_begun_ends_before_its_cancellation_counts() -> None:
    network = Network()
    learn = TrainCritic(network)  # type: ignore[arg-type]
    async with asyncio.timeout(10):
        task = asyncio.create_task(learn(3, [PAIR], VALUES, RETURNS), name="learn")  # type: ignore[arg-type]
        await network.began.wait()
        task.cancel()
        network.may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert len(network.learnt) == 1


@pytest.mark.parametrize(
    "config", [FilterConfig(accuracy_bounds=(0.1, 0.9)), FilterConfig(drop_equal="success")]
)
def test_a_filter_by_success_is_refused_if_success_is_unknown(config: FilterConfig) -> None:
    is_kept = group_filter(config)
    assert is_kept is not None
    with pytest.raises(EnvError, match="filters groups by success"):
        is_kept(SILENT)


def test_an_episode_that_was_cut_off_is_compared_but_not_learnt_from() -> None:
    ended, cut_off = trajectory([[1.0]], 0), trajectory([[1.0]], 1, StopReason.TIME_LIMIT)
    assert select_episodes([cut_off, ended], [-1.0, 1.0], mask_truncated=True) == ([1], [1.0])
    assert select_episodes([cut_off, ended], [-1.0, 1.0], mask_truncated=False) == (
        [0, 1],
        [-1.0, 1.0],
    )
    assert select_episodes([cut_off, cut_off], [-1.0, 1.0], mask_truncated=True) == ([], [])


def test_a_success_at_the_time_limit_was_evaluated_and_passes_the_filters() -> None:
    ended, in_time = trajectory([[1.0]], 0), trajectory([[1.0]], 1, StopReason.SUCCESS_AT_LIMIT)
    assert select_episodes([in_time, ended], [-1.0, 1.0], mask_truncated=True) == (
        [0, 1],
        [-1.0, 1.0],
    )
    keep = group_filter(FilterConfig(drop_truncated=True))
    assert keep is not None
    assert keep(make_group(ended, in_time))
    assert not keep(make_group(ended, trajectory([[1.0]], 1, StopReason.TIME_LIMIT)))


@pytest.mark.parametrize(
    ("config", "is_kept"),
    [
        (FilterConfig(accuracy_bounds=(0.1, 0.9)), True),
        (FilterConfig(accuracy_bounds=(0.6, 0.9)), False),
        (FilterConfig(drop_equal="success"), True),
        (FilterConfig(drop_equal="return"), True),
        (FilterConfig(drop_truncated=True), True),
    ],
)
def test_groups_that_are_worth_an_update_are_kept(config: FilterConfig, is_kept: bool) -> None:
    keep = group_filter(config)
    assert keep is not None
    assert keep(PAIR) is is_kept


def test_groups_that_give_no_signal_are_dropped_and_no_filter_keeps_everything() -> None:
    unsolved = {"is_success": False}
    equal = make_group(
        trajectory([[1.0, 1.0]], 0, info=unsolved),
        trajectory([[2.0]], 1, StopReason.TIME_LIMIT, unsolved),
    )
    kept = {
        config: keep(equal)
        for config in (
            FilterConfig(drop_equal="success"),
            FilterConfig(drop_equal="return"),
            FilterConfig(drop_truncated=True),
        )
        if (keep := group_filter(config)) is not None
    }
    assert list(kept.values()) == [False, False, False]
    assert group_filter(FilterConfig()) is None


def test_a_group_is_kept_where_one_agent_has_something_to_learn() -> None:
    keep = group_filter(FilterConfig(drop_equal="return"))
    assert keep is not None
    crossed = make_group(
        shared(0, ("solver", 1.0), ("checker", 0.0)), shared(1, ("solver", 0.0), ("checker", 1.0))
    )
    equal = make_group(
        shared(0, ("solver", 1.0), ("checker", 0.5)), shared(1, ("solver", 1.0), ("checker", 0.5))
    )
    assert keep(crossed)
    assert not keep(equal)
