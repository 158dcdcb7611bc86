"""Penalties for length and for distance from the reference policy."""

import numpy as np
import pytest
from small_episodes import PAIR

from vla_rl.algorithms.filters import OverlongConfig
from vla_rl.algorithms.kl import KlRewardConfig
from vla_rl.learner.checkpoint.state import pack, unpack
from vla_rl.pipelines.nodes.advantages import KlCoefficient, KlPenalty, OverlongPenalty


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
    played = [await coefficient(penalty, update) for update in range(5)]
    assert played[0] == 0.5
    assert played == sorted(set(played))
    saved = pack(penalty.state())
    played.append(await coefficient(penalty, 5))
    # updates are rewarded up to two ahead of the one that is learnt from
    for next_to_learn in (2, 3, 4, 5):
        resumed = KlPenalty(config, max_staleness=2)
        resumed.restore(unpack(saved, KlCoefficient))
        assert [await coefficient(resumed, update) for update in range(next_to_learn, 6)] == played[
            next_to_learn:
        ]


async def test_a_coefficient_that_was_saved_without_those_before_it_is_still_read() -> None:
    older = pack({"update": 1, "coef": 0.25, "next_coef": 0.75})
    penalty = KlPenalty(KlRewardConfig(coef=0.5), max_staleness=1)
    penalty.restore(unpack(older, KlCoefficient))
    references = [np.zeros((2, 2), np.float32), np.zeros((1, 2), np.float32)]
    output = await penalty(2, [PAIR], [[1.0, 0.5]], [references])
    assert output.metrics["reward/kl_coef"] == 0.75
