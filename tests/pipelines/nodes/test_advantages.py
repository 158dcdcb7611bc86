"""Advantages of episodes and of the agents in them."""

from typing import Any

import numpy as np
import pytest
from small_episodes import PAIR, SHARED, group_of, played_greedily, shared, trajectory

from vla_rl.algorithms import AdvantageConfig
from vla_rl.graph import WrongInput
from vla_rl.learner import TrajectoryValues
from vla_rl.pipelines.nodes.advantages import CriticAdvantage, GroupAdvantage
from vla_rl.pipelines.nodes.rewards import GroupReward, RewardConfig
from vla_rl.pipelines.nodes.run_parts import select_episodes
from vla_rl.types import StopReason


async def test_advantages_compare_episodes_and_not_decisions() -> None:
    output = await GroupAdvantage(AdvantageConfig(name="dr_grpo"))(
        [PAIR], [[np.array([3.0, 4.0]), 1.0]]
    )
    assert [np.asarray(row).tolist() for row in output.batch] == [[3.0, 3.0], [-3.0]]
    flat = await GroupAdvantage(AdvantageConfig(name="dr_grpo"))(
        [PAIR], np.array([7.0, 1.0], np.float32)
    )
    assert [np.asarray(row).tolist() for row in flat.batch] == [[3.0, 3.0], [-3.0]]


async def test_an_end_is_an_end_and_a_time_limit_is_continued() -> None:
    ended, cut_off = trajectory([[1.0, 1.0]], 0), trajectory([[1.0, 1.0]], 1, StopReason.TIME_LIMIT)
    judged = [
        TrajectoryValues(np.array([0.5], np.float32), 0.0),
        TrajectoryValues(np.array([0.5], np.float32), 10.0),
    ]
    config = AdvantageConfig(name="gae", gamma=0.9, lam=1.0, whiten=False)
    output = await CriticAdvantage(config)([group_of(ended, cut_off)], [[2.0, 2.0]], [judged])
    assert output.values is not None
    # the chunk took two control steps, so what comes after it is worth 0.81
    np.testing.assert_allclose(
        np.concatenate(output.values["returns"]), [2.0, 2.0 + 8.1], rtol=1e-6
    )
    np.testing.assert_allclose(np.concatenate(output.values["advantages"]), [1.5, 9.6], rtol=1e-6)


async def test_remax_compares_with_the_greedy_member_and_learns_from_the_others() -> None:
    sampled, other = trajectory([[1.0], [2.0]], 0), trajectory([[0.5]], 1)
    group = group_of(sampled, other, played_greedily(trajectory([[2.0]], 2)))
    output = await GroupAdvantage(AdvantageConfig(name="remax"))(
        [group], [[np.array([1.0, 2.0]), 0.5, 2.0]]
    )
    # rewards from each decision on, less the greedy outcome of 2
    assert [np.asarray(row).tolist() for row in output.batch] == [[1.0, 0.0], [-1.5], [0.0]]
    assert select_episodes(group.trajectories, [1.0, 2.0, 3.0], mask_truncated=False) == (
        [0, 1],
        [1.0, 2.0],
    )


@pytest.mark.parametrize(
    ("rewards", "problem"),
    [
        (np.zeros(1), r"its shape is \[1\], expected \[2\], one reward for each episode"),
        (np.zeros((2, 1)), r"its shape is \[2, 1\], expected \[2\]"),
        ([1.0], r"its shape is \[1\], expected \[2\]"),
        ([[1.0]], r"its groups have \[1\] rewards, expected \[2\]"),
        (
            np.array([0.0, np.nan]),
            r"the reward of episode 1 \(none\) is nan, expected a finite number",
        ),
        (
            [[np.zeros(3), 0.0]],
            r"the reward of episode 0 \(none\) is .*, or 2 of them, one for each decision",
        ),
    ],
)
async def test_rewards_that_do_not_fit_are_blamed_on_the_node_that_made_them(
    rewards: Any, problem: str
) -> None:
    with pytest.raises(WrongInput, match=f"^rewards: {problem}") as caught:
        await GroupAdvantage(AdvantageConfig(name="grpo"))([PAIR], rewards)
    assert caught.value.parameter == "rewards"


async def test_a_flat_list_of_rewards_is_one_for_each_episode() -> None:
    estimate = GroupAdvantage(AdvantageConfig(name="grpo"))
    listed, packed = (
        await estimate([PAIR], [1.0, 2.0]),
        await estimate([PAIR], np.array([1.0, 2.0])),
    )
    assert [each.tolist() for each in listed.batch] == [each.tolist() for each in packed.batch]


async def test_an_agent_is_compared_with_itself_where_it_took_part() -> None:
    rewards = (await GroupReward(RewardConfig())(SHARED)).batch
    output = await GroupAdvantage(AdvantageConfig(name="dr_grpo"))([SHARED], [rewards])
    # solver: 1, 0, 0.5 with a mean of 0.5; checker: 1 and 0.5 with a mean of 0.75, in the two
    # episodes that it saw
    assert [np.asarray(row).tolist() for row in output.batch] == [
        [0.5, 0.25, 0.5],
        [-0.5, -0.25],
        [0.0],
    ]
    assert output.metrics["advantage/groups_that_teach"] == 1.0


async def test_one_number_for_an_episode_is_every_agents() -> None:
    output = await GroupAdvantage(AdvantageConfig(name="dr_grpo"))(
        [SHARED], np.array([1.0, 0.0, 0.5], np.float32)
    )
    # solver: 1, 0, 0.5; checker: 1, 0
    assert [np.asarray(row).tolist() for row in output.batch] == [
        [0.5, 0.5, 0.5],
        [-0.5, -0.5],
        [0.0],
    ]


async def test_marfts_row_holds_all_agents_in_order_of_acting() -> None:
    episode = group_of(shared(0, ("solver", 0.5), ("checker", 1.0)))
    config = AdvantageConfig(name="marft_gae", gamma=0.5, lam=1.0, whiten=False)
    judged = [TrajectoryValues(np.array([0.25, 0.75], np.float32), 0.0)]
    output = await CriticAdvantage(config)([episode], [[np.array([0.5, 1.0])]], [judged])
    # checker: 1 - 0.75; solver: 0.5 + 0.5 * 0.75 - 0.25, and half of the checker's
    assert np.asarray(output.values["advantages"][0]).tolist() == [0.75, 0.25]
