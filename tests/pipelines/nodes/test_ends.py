"""An update learns from the episodes that are left, tells the scheduler once, and is never half done."""

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from small_episodes import PAIR, group_of, played_greedily, trajectory

from vla_rl.graph.failures import WrongInput
from vla_rl.learner.learner import UpdateReport
from vla_rl.pipelines.nodes.run_parts import Learn, Save, Show
from vla_rl.types import Group, StopReason, Trajectory


class CountedUpdates:
    """A learner that only counts its updates, and notes what each learned from."""

    def __init__(self) -> None:
        self.weight_version = 0
        self.learned: list[tuple[list[int], list[float], Any]] = []
        self.begun = asyncio.Event()
        self.may_end: asyncio.Event | None = None

    async def update(
        self, trajectories: Sequence[Trajectory], advantages: Sequence[float], references: Any
    ) -> UpdateReport:
        numbers = [each.episode.episode_id for each in trajectories]
        self.learned.append((numbers, [float(each) for each in advantages], references))
        self.begun.set()
        if self.may_end is not None:
            await self.may_end.wait()
        return await self.stand_still()

    async def stand_still(self) -> UpdateReport:
        self.weight_version += 1
        return UpdateReport(weight_version=self.weight_version, metrics={"update/taught": 1.0})


class Ledger:
    """A scheduler that only notes which groups were trained on."""

    def __init__(self) -> None:
        self.version = 0
        self.groups: list[Sequence[Group]] = []

    def trained(self, groups: Sequence[Group], version: int) -> None:
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
    assert made.metrics == {"update/taught": 1.0}
    assert node.is_between_updates
    assert (await node([PAIR], [0.5, -0.5])).values == {"snapshot": "the state"}


async def test_episodes_that_are_not_learned_from_take_their_references_along() -> None:
    learner = CountedUpdates()
    groups = [
        group_of(trajectory([[1.0]], 0), trajectory([[0.0]], 1, StopReason.TIME_LIMIT)),
        group_of(played_greedily(trajectory([[1.0]], 2)), trajectory([[1.0]], 3)),
    ]
    await learn(learner, Ledger(), mask_truncated=True)(
        groups, [1.0, 2.0, 3.0, 4.0], [["a", "b"], ["c", "d"]]
    )
    assert learner.learned == [([0, 3], [1.0, 4.0], ["a", "d"])]


async def test_an_update_without_an_episode_counts_and_changes_nothing() -> None:
    learner, ledger = CountedUpdates(), Ledger()
    cut = group_of(trajectory([[0.0]], 0, StopReason.TIME_LIMIT))
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
        await learner.begun.wait()
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
