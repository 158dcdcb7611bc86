"""From the rewards of one group's episodes, with penalties, to the advantage of each decision."""

import asyncio
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from small_episodes import PAIR, SHARED, SILENT, as_greedy, make_group, shared, trajectory

from vla_rl.algorithms import AdvantageConfig
from vla_rl.algorithms.filters import OverlongConfig
from vla_rl.algorithms.kl import KlRewardConfig
from vla_rl.errors import ConfigError, EnvError
from vla_rl.graph import WrongInput
from vla_rl.learner import TrajectoryValues
from vla_rl.learner.checkpoint.state import pack, unpack
from vla_rl.pipelines.nodes.advantages import (
    CriticAdvantage,
    GroupAdvantage,
    KlCoefficient,
    KlPenalty,
    OverlongPenalty,
)
from vla_rl.pipelines.nodes.rewards import (
    GroupReward,
    RewardConfig,
    outcomes_by_agent,
    rewards_by_group,
)
from vla_rl.pipelines.nodes.run_parts import select_episodes
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


async def test_episodes_that_the_agent_cut_off_are_failures_though_nobody_evaluated_them() -> None:
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


async def test_long_episodes_lose_up_to_the_whole_factor() -> None:
    # tokens: 3 and 1; the penalty rises from 0 at 1 to 2 at 3 (max_length 3, buffer 2, factor 2)
    penalty = OverlongPenalty(OverlongConfig(max_length=3, buffer=2, factor=2.0))
    output = await penalty([PAIR], [[np.array([3.0, 4.0]), 0.5]])
    assert [row.tolist() for row in output.batch[0]] == [[3.0, 2.0], [0.5]]
    assert output.metrics["reward/overlong_mean"] == pytest.approx(-1.0)
    assert {row.dtype for row in output.batch[0]} == {np.dtype(np.float32)}
    untouched = await OverlongPenalty(OverlongConfig())([PAIR], np.array([7.0, 0.5], np.float32))
    assert [row.tolist() for row in untouched.batch[0]] == [[0.0, 7.0], [0.5]]


async def test_distance_from_the_reference_costs_where_it_is_taken() -> None:
    # behavior says -1 everywhere; the reference -3 for the first token, and something far off where
    # nothing ran
    references = [
        np.array([[-3.0, -1.0], [-1.5, -99.0]], np.float32),
        np.array([[-1.0, -99.0]], np.float32),
    ]
    penalty = KlPenalty(KlRewardConfig(coef=0.5), max_staleness=0)
    output = await penalty(0, [PAIR], [[np.array([3.0, 4.0]), 0.5]], [references])
    assert [row.tolist() for row in output.batch[0]] == [[2.0, 3.75], [0.5]]
    assert {row.dtype for row in output.batch[0]} == {np.dtype(np.float32)}
    # over the four tokens that ran
    assert output.metrics["reward/reference_kl"] == pytest.approx(2.5 / 4)


async def test_a_distance_from_the_reference_that_is_not_finite_is_refused_with_its_episode() -> (
    None
):
    references = [
        np.array([[-3.0, -1.0], [-np.inf, -99.0]], np.float32),
        np.array([[-1.0, -99.0]], np.float32),
    ]
    with pytest.raises(
        ValueError, match="the distance of decision 1 of episode 0 from the reference policy is inf"
    ):
        await KlPenalty(KlRewardConfig(coef=0.5), max_staleness=0)(
            0, [PAIR], [[1.0, 0.5]], [references]
        )


async def test_the_distance_that_steers_the_weight_is_a_mean_over_tokens_or_over_trajectories() -> (
    None
):
    # the first episode is 2.5 nats away over three tokens, the second 0 over one
    references = [
        np.array([[-3.0, -1.0], [-1.5, -99.0]], np.float32),
        np.array([[-1.0, -99.0]], np.float32),
    ]
    for average, expected in (("tokens", 2.5 / 4), ("trajectories", 2.5 / 3 / 2)):
        penalty = KlPenalty(
            KlRewardConfig(coef=0.5, target=1.0, horizon=10, average=average), max_staleness=0
        )
        output = await penalty(0, [PAIR], [[1.0, 0.5]], [references])
        assert output.metrics["reward/reference_kl"] == pytest.approx(expected)
        error = max(expected - 1.0, -0.2)
        assert penalty.state().next_coef == pytest.approx(0.5 * (1.0 + error * 2 / 10))


async def test_an_update_that_is_made_again_has_the_coefficient_that_it_had() -> None:
    references = [np.full((2, 2), -2.0, np.float32), np.full((1, 2), -2.0, np.float32)]
    config = KlRewardConfig(coef=0.5, target=0.1, horizon=10)

    async def coefficient(penalty: KlPenalty, update: int) -> float:
        return (await penalty(update, [PAIR], [[1.0, 0.5]], [references])).metrics["reward/kl_coef"]

    penalty = KlPenalty(config, max_staleness=2)
    coefficients = [await coefficient(penalty, update) for update in range(5)]
    assert coefficients[0] == 0.5
    assert coefficients == sorted(set(coefficients))
    saved = pack(penalty.state())
    coefficients.append(await coefficient(penalty, 5))
    # updates are rewarded up to two ahead of the one that is learnt from
    for next_to_learn in (2, 3, 4, 5):
        resumed = KlPenalty(config, max_staleness=2)
        resumed.restore(unpack(saved, KlCoefficient))
        assert [
            await coefficient(resumed, update) for update in range(next_to_learn, 6)
        ] == coefficients[next_to_learn:]


async def test_a_coefficient_that_was_saved_without_those_before_it_is_still_read() -> None:
    older = pack({"update": 1, "coef": 0.25, "next_coef": 0.75})
    penalty = KlPenalty(KlRewardConfig(coef=0.5), max_staleness=1)
    penalty.restore(unpack(older, KlCoefficient))
    references = [np.zeros((2, 2), np.float32), np.zeros((1, 2), np.float32)]
    output = await penalty(2, [PAIR], [[1.0, 0.5]], [references])
    assert output.metrics["reward/kl_coef"] == 0.75


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
    values = [
        TrajectoryValues(np.array([0.5], np.float32), 0.0),
        TrajectoryValues(np.array([0.5], np.float32), 10.0),
    ]
    config = AdvantageConfig(name="gae", gamma=0.9, lam=1.0, whiten=False)
    output = await CriticAdvantage(config)([make_group(ended, cut_off)], [[2.0, 2.0]], [values])
    assert output.values is not None
    # the chunk took two control steps, so what comes after it is worth 0.81
    np.testing.assert_allclose(
        np.concatenate(output.values["returns"]), [2.0, 2.0 + 8.1], rtol=1e-6
    )
    np.testing.assert_allclose(np.concatenate(output.values["advantages"]), [1.5, 9.6], rtol=1e-6)


async def test_remax_compares_with_the_greedy_member_and_learns_from_the_others() -> None:
    sampled, other = trajectory([[1.0], [2.0]], 0), trajectory([[0.5]], 1)
    group = make_group(sampled, other, as_greedy(trajectory([[2.0]], 2)))
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
        ({"rewards": [1.0, 2.0]}, "it is a dict, expected an array or a list of rewards"),
        ("rewards", "it is a str, expected"),
        ([None, None], "a reward is no number"),
        (np.array([object(), 1.0]), "the reward of episode .* is <object object"),
        (torch.ones(2, requires_grad=True), "it cannot be read as an array: .*detach"),
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


async def test_rewards_may_be_tensors_as_a_model_returns_them() -> None:
    for rewards in (torch.tensor([1.0, 2.0]), [torch.tensor(1.0), torch.tensor(2.0)]):
        (found,) = rewards_by_group([PAIR], rewards)  # type: ignore[arg-type]
        assert [each.tolist() for each in found] == [[0.0, 1.0], [2.0]]


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
    assert output.metrics["advantage/groups_with_signal"] == 1.0


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
    episode = make_group(shared(0, ("solver", 0.5), ("checker", 1.0)))
    config = AdvantageConfig(name="marft_gae", gamma=0.5, lam=1.0, whiten=False)
    values = [TrajectoryValues(np.array([0.25, 0.75], np.float32), 0.0)]
    output = await CriticAdvantage(config)([episode], [[np.array([0.5, 1.0])]], [values])
    # checker: 1 - 0.75; solver: 0.5 + 0.5 * 0.75 - 0.25, and half of the checker's
    assert np.asarray(output.values["advantages"][0]).tolist() == [0.75, 0.25]
