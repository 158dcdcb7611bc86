"""Rewards of one group's episodes, in the one form in which other nodes read them."""

import asyncio
from typing import Any

import msgspec
import numpy as np
import pytest
from small_episodes import PAIR, SHARED, SILENT, make_group, trajectory

from vla_rl.errors import ConfigError, EnvError
from vla_rl.pipelines.nodes.rewards import (
    GroupReward,
    RewardConfig,
    outcomes_by_agent,
    rewards_by_group,
)
from vla_rl.types import StopReason


async def rewards_of(**config: Any) -> list[Any]:
    output = await GroupReward(RewardConfig(**config))(PAIR)
    return [np.asarray(reward).tolist() for reward in output.batch]


async def test_the_environment_pays_for_each_decision_and_success_for_the_episode() -> None:
    assert await rewards_of(function="environment") == [[3.0, 4.0], [0.5]]
    assert await rewards_of(function="success") == [[0.0, 0.0], [1.0]]


async def test_the_success_rate_of_a_group_is_left_out_if_success_is_unknown() -> None:
    assert (await GroupReward(RewardConfig())(PAIR)).metrics["reward/success_rate"] == 0.5
    assert "reward/success_rate" not in (await GroupReward(RewardConfig())(SILENT)).metrics


async def test_the_parts_of_an_environments_score_are_metrics() -> None:
    scores = ({"total": 0.5, "comfort": 1.0}, {"total": 1.0})
    parts = [trajectory([[0.0]], number, info={"score": s}) for number, s in enumerate(scores)]
    group = msgspec.structs.replace(PAIR, trajectories=tuple(parts))
    metrics = (await GroupReward(RewardConfig())(group)).metrics
    assert metrics["score/total"] == 0.75
    assert metrics["score/comfort"] == 1.0
    plain = (await GroupReward(RewardConfig())(PAIR)).metrics
    assert not any(name.startswith("score/") for name in plain)


async def test_a_reward_for_success_is_refused_if_success_is_unknown() -> None:
    with pytest.raises(
        EnvError, match=r"reward.function is 'success', but no episode of none .* 'is_success'"
    ):
        await GroupReward(RewardConfig(function="success"))(SILENT)


async def test_episodes_that_the_agent_cut_off_are_failures_though_nobody_judged_them() -> None:
    cut = make_group(trajectory([[1.0]], 0, StopReason.TURN_LIMIT))
    assert (await GroupReward(RewardConfig(function="success"))(cut)).batch == [
        np.zeros(1, np.float32)
    ]


@pytest.mark.parametrize("manager", ["each", "threads"])
async def test_a_reward_of_ones_own_is_named_by_its_function(manager: str) -> None:
    assert await rewards_of(function="own_parts:by_length", manager=manager) == [
        [0.0, -2.0],
        [-1.0],
    ]


async def test_a_reward_may_wait_and_a_manager_may_be_ones_own() -> None:
    assert await rewards_of(function="own_parts:by_length_later") == [[0.0, -2.0], [-1.0]]
    assert await rewards_of(function="own_parts:by_length", manager="own_parts:halved") == [
        [0.0, -1.0],
        [-0.5],
    ]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"function": "sucess"}, "did you mean 'success'"),
        ({"manager": "thread"}, "did you mean 'threads'"),
        ({"function": "own_parts:by_lenght"}, "did you mean 'by_length'"),
    ],
)
def test_an_unknown_reward_is_refused_with_the_nearest(
    config: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        GroupReward(RewardConfig(**config))


async def test_a_reward_that_is_not_finite_is_refused_with_its_episode() -> None:
    bad = msgspec.structs.replace(
        PAIR, trajectories=(PAIR.trajectories[0], trajectory([[float("nan")]], 7))
    )
    with pytest.raises(ValueError, match="the reward of episode 7"):
        await GroupReward(RewardConfig())(bad)


async def test_threads_let_rewards_that_block_run_beside_each_other() -> None:
    async with asyncio.timeout(30):
        assert await rewards_of(function="own_parts:waits_for_the_other", manager="threads") == [
            [0.0, 1.0],
            [1.0],
        ]


async def test_what_agents_earn_is_reported_by_name() -> None:
    metrics = (await GroupReward(RewardConfig())(SHARED)).metrics
    assert metrics["reward/solver/mean"] == pytest.approx(0.5)
    assert metrics["reward/checker/mean"] == pytest.approx(0.75)
    # of each episode the mean of its agents: 1, 0.25, 0.5
    assert metrics["reward/mean"] == pytest.approx(1.75 / 3)
    assert "reward/policy/mean" not in (await GroupReward(RewardConfig())(PAIR)).metrics


@pytest.mark.parametrize("function", ["environment", "success", "own_parts:by_length"])
async def test_whatever_a_reward_returns_the_node_writes_float32_for_each_decision(
    function: str,
) -> None:
    rewards = (await GroupReward(RewardConfig(function=function))(PAIR)).batch
    assert [(each.dtype, each.shape) for each in rewards] == [
        (np.float32, (2,)),
        (np.float32, (1,)),
    ]


async def test_one_number_goes_to_the_last_decision_of_each_agent() -> None:
    (found,) = rewards_by_group([SHARED], np.array([1.0, 2.0, 0.5]))
    assert [each.tolist() for each in found] == [[0.0, 1.0, 1.0], [2.0, 2.0], [0.5]]
    assert [outcomes_by_agent(*pair) for pair in zip(SHARED.trajectories, found, strict=True)] == [
        {"checker": 1.0, "solver": 1.0},
        {"checker": 2.0, "solver": 2.0},
        {"solver": 0.5},
    ]


async def test_rewards_in_the_nodes_own_form_are_read_as_they_are() -> None:
    written = (await GroupReward(RewardConfig())(PAIR)).batch
    (read,) = rewards_by_group([PAIR], [written])
    assert all(each is same for each, same in zip(read, written, strict=True))
