"""Floats that others hand to the learner: refused where they enter, with the episode, before any
weight moves.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from small_episodes import SHAPE, mlp, trajectory, walk
from torch import Tensor

from vla_rl.algorithms import CorrectionConfig, KlLossConfig, PolicyLossConfig
from vla_rl.engines import DeviceLane
from vla_rl.learner import (
    Critic,
    CriticConfig,
    Learner,
    LearnerConfig,
    LearnerTeam,
    OptimizerConfig,
    Reference,
    TrajectoryValues,
)
from vla_rl.learner.decisions import flatten_trajectories
from vla_rl.learner.finiteness import require_returns, require_values
from vla_rl.models.mlp import MlpPolicy
from vla_rl.types import StopReason, Trajectory

NAN, INFINITY = float("nan"), float("inf")


def parameters(policy: MlpPolicy) -> Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in policy.network.parameters()])


def config(**changes: Any) -> LearnerConfig:
    return msgspec.structs.replace(
        LearnerConfig(optimizer=OptimizerConfig(lr=1e-3, warmup_steps=0)), **changes
    )


def with_log_prob(
    trajectory: Trajectory, value: float, number: int = 2, token: int = 1, **kinds: Any
) -> Trajectory:
    """The same trajectory, in which the engine says this of one token of one decision."""
    steps = list(trajectory.steps)
    log_probs = steps[number].chunk.log_probs.copy()
    log_probs[token] = value
    chunk = msgspec.structs.replace(steps[number].chunk, log_probs=log_probs, **kinds)
    steps[number] = msgspec.structs.replace(steps[number], chunk=chunk)
    return msgspec.structs.replace(trajectory, steps=tuple(steps))


LOSSES = [
    *(
        PolicyLossConfig(name=name)
        for name in ("ppo", "gspo", "gmpo", "dppo", "ipo", "icepop", "m2po", "sapo", "cispo")
    ),
    PolicyLossConfig(correction=CorrectionConfig(mask="token")),
    PolicyLossConfig(name="decoupled_ppo"),
]


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: f"{loss.name}-{loss.correction.mask}")
@pytest.mark.parametrize("value", [NAN, INFINITY, -INFINITY])
async def test_a_log_prob_that_is_not_finite_is_refused_in_any_update_before_the_weights_move(
    lane: DeviceLane, loss: PolicyLossConfig, value: float
) -> None:
    policy = mlp()
    learner = Learner(policy, lane, config(loss=loss))
    async with asyncio.timeout(30):
        await learner.update([walk(policy, 1, 3), walk(policy, 2, 2)], [1.0, -0.5])
        before = parameters(policy)
        stale = [walk(policy, 3, 2), with_log_prob(walk(policy, 7, 4), value)]
        with pytest.raises(
            ValueError,
            match="the engine's log-prob of token 1 of decision 2 of episode 7 is "
            rf"{value}, expected a finite number of at most 0; the weights or inputs that it acted with hold NaN",
        ):
            await learner.update(stale, [1.0, -0.5])
    assert torch.equal(parameters(policy), before)
    assert learner.weight_version == 1


def test_a_log_prob_above_zero_is_refused_but_for_rounding() -> None:
    trajectory = walk(mlp(), 7, 4)
    flatten_trajectories([with_log_prob(trajectory, 1e-5)], [1.0])
    with pytest.raises(
        ValueError,
        match=r"token 1 of decision 2 of episode 7 is 0\.5, expected a finite number of at",
    ):
        flatten_trajectories([with_log_prob(trajectory, 0.5)], [1.0])


def test_the_density_of_a_number_may_be_above_one_but_is_finite() -> None:
    trajectory = walk(mlp(), 7, 1)
    for value, is_refused in ((3.0, False), (INFINITY, True)):
        numbers = trajectory.steps[0].chunk.tokens.astype(np.float32)
        told = with_log_prob(trajectory, value, number=0, tokens=numbers)
        if not is_refused:
            assert flatten_trajectories([told], [1.0]).behavior_log_prob[0, 1] == 3.0
            continue
        with pytest.raises(
            ValueError, match="episode 7 is inf, expected a finite number; the weights"
        ):
            flatten_trajectories([told], [1.0])


def test_what_an_engine_says_of_tokens_that_did_not_run_may_be_anything() -> None:
    trajectory = with_log_prob(walk(mlp(), 7, 1), NAN, number=0, token=1)
    short = msgspec.structs.replace(trajectory.steps[0], rewards=np.ones(1, np.float32))
    decisions = flatten_trajectories([msgspec.structs.replace(trajectory, steps=(short,))], [1.0])
    assert decisions.mask.tolist() == [[True, False]]


def test_log_probs_of_another_number_than_tokens_name_the_episode() -> None:
    trajectory = walk(mlp(), 7, 2)
    chunk = msgspec.structs.replace(trajectory.steps[1].chunk, log_probs=np.zeros(3, np.float32))
    short = (trajectory.steps[0], msgspec.structs.replace(trajectory.steps[1], chunk=chunk))
    with pytest.raises(
        ValueError, match=r"decision 1 of episode 7 has log_probs \[3\] for tokens \[2\]"
    ):
        flatten_trajectories([msgspec.structs.replace(trajectory, steps=short)], [1.0])


async def test_in_a_team_the_agent_that_decided_is_named_too(lane: DeviceLane) -> None:
    policy = mlp()
    trajectory = with_log_prob(walk(policy, 7, 3), NAN)
    steps = tuple(msgspec.structs.replace(step, agent="solver") for step in trajectory.steps)
    team = LearnerTeam({"solver": Learner(policy, lane, config())})
    async with asyncio.timeout(30):
        with pytest.raises(
            ValueError, match="token 1 of decision 2 of agent 'solver' of episode 7 is nan"
        ):
            await team.update([msgspec.structs.replace(trajectory, steps=steps)], [1.0])


@pytest.mark.parametrize("value", [NAN, -INFINITY, 0.5])
def test_the_log_probs_of_a_reference_are_held_to_the_same(value: float) -> None:
    trajectory = walk(mlp(), 7, 4)
    reference = np.stack([step.chunk.log_probs for step in trajectory.steps])
    reference[3, 0] = value
    with pytest.raises(
        ValueError,
        match=rf"the reference's log-prob of token 0 of decision 3 of episode 7 is {value}",
    ):
        flatten_trajectories([trajectory], [1.0], [reference])


def forbid(policy: MlpPolicy, trajectory: Trajectory, number: int) -> None:
    """Mask the bin that one decision's first token chose, as a policy over fewer tokens would."""
    chosen = int(trajectory.steps[number].chunk.tokens[0])
    with torch.no_grad():
        policy.network.head.bias[chosen] = -INFINITY


async def test_a_reference_that_may_not_choose_what_was_chosen_is_named(lane: DeviceLane) -> None:
    trajectory, frozen = walk(mlp(), 7, 3), mlp()
    forbid(frozen, trajectory, 0)
    async with asyncio.timeout(30):
        with pytest.raises(
            ValueError,
            match=r"the reference's log-prob of token 0 of decision \d of episode 7 is -inf",
        ):
            await Reference(frozen, lane, micro_batch=2).log_probs([walk(mlp(), 3, 2), trajectory])


@pytest.mark.parametrize(
    "loss",
    [
        PolicyLossConfig(),
        PolicyLossConfig(name="decoupled_ppo"),
        PolicyLossConfig(kl=KlLossConfig(coef=0.1)),
    ],
)
async def test_a_learner_that_may_not_choose_what_the_engine_chose_does_not_go_on_without_that_token(
    lane: DeviceLane, loss: PolicyLossConfig
) -> None:
    policy = mlp()
    learner = Learner(policy, lane, config(loss=loss, micro_batch=1))
    trajectories = [walk(policy, 1, 2), walk(policy, 7, 3)]
    references = [
        [step.chunk.log_probs for step in trajectory.steps] for trajectory in trajectories
    ]
    async with asyncio.timeout(30):
        await learner.update(
            trajectories, [1.0, -0.5], references if loss.needs_reference else None
        )
        forbid(policy, trajectories[1], 0)
        before = parameters(policy)
        with pytest.raises(ValueError, match=r"log-prob.*token 0 of decision \d of episode \d"):
            await learner.update(
                trajectories, [1.0, -0.5], references if loss.needs_reference else None
            )
    assert torch.equal(parameters(policy), before)


class Crude(MlpPolicy):
    """A policy whose log-probs and entropies are spoiled on their way out."""

    spoil: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]

    def log_probs(
        self, batch: Tensor, tokens: Tensor, temperatures: Tensor
    ) -> tuple[Tensor, Tensor]:
        return self.spoil(*super().log_probs(batch, tokens, temperatures))


def crude(spoil: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Crude:
    policy = Crude(SHAPE, mlp().network)
    policy.spoil = spoil
    return policy


async def test_an_entropy_that_is_not_finite_is_refused(lane: DeviceLane) -> None:
    policy = crude(lambda log_prob, entropy: (log_prob, entropy / 0.0))
    async with asyncio.timeout(30):
        with pytest.raises(
            ValueError,
            match=r"Crude\.log_probs gave .* entropy that is not finite, for token 0 of decision 0 of episode 7",
        ):
            await Learner(policy, lane, config()).update([walk(policy, 7, 2)], [1.0])


async def test_a_policy_that_computes_its_log_probs_in_bfloat16_is_refused(
    lane: DeviceLane,
) -> None:
    policy = crude(lambda log_prob, entropy: (log_prob.bfloat16(), entropy))
    async with asyncio.timeout(30):
        with pytest.raises(
            ValueError, match=r"Crude\.log_probs gave torch\.bfloat16, expected torch\.float32"
        ):
            await Learner(policy, lane, config()).update([walk(policy, 7, 2)], [1.0])


async def test_values_of_a_critic_that_are_not_finite_are_refused_where_they_are_made(
    lane: DeviceLane,
) -> None:
    policy = mlp()
    critic = Critic(policy, lane, CriticConfig(), seed=0)
    with torch.no_grad():
        critic.head.out.bias.fill_(INFINITY)
    async with asyncio.timeout(30):
        with pytest.raises(
            ValueError,
            match="the values of episode 7 hold inf at decision 0, expected finite numbers",
        ):
            await critic.values([walk(policy, 7, 2)])


@pytest.mark.parametrize(
    ("values", "bootstrap", "returns", "complaint"),
    [
        ([0.0, NAN], 0.0, [1.0, 1.0], "the values of episode 7 hold nan at decision 1"),
        (
            [0.0],
            0.0,
            [1.0, 1.0],
            r"the values of episode 7 are \[1\], expected \[2\]: one for each decision",
        ),
        ([0.0, 0.0], INFINITY, [1.0, 1.0], "the final observation of episode 7 is inf"),
        (
            [0.0, 0.0],
            0.0,
            [INFINITY, 1.0],
            "the returns of episode 7 hold inf at decision 0.*look at its rewards",
        ),
        ([0.0, 0.0], 0.0, [1.0], r"the returns of episode 7 are \[1\], expected \[2\]"),
    ],
)
async def test_a_critic_learns_from_finite_numbers_only(
    lane: DeviceLane, values: list[float], bootstrap: float, returns: list[float], complaint: str
) -> None:
    policy = mlp()
    trajectory = walk(policy, 7, 2, stop_reason=StopReason.TIME_LIMIT)
    critic = Critic(policy, lane, CriticConfig(), seed=0)
    async with asyncio.timeout(30):
        estimated = TrajectoryValues(np.array(values, np.float32), bootstrap)
        with pytest.raises(ValueError, match=complaint):
            await critic.fit_values([trajectory], [estimated], [np.array(returns, np.float32)])


TWO = trajectory([[1.0], [2.0]], number=7)


def estimated(*values: float, bootstrap: float = 0.0) -> TrajectoryValues:
    return TrajectoryValues(np.array(values, np.float32), bootstrap)


def test_one_finite_value_for_each_decision_passes() -> None:
    require_values([TWO], [estimated(0.5, 1.5, bootstrap=2.0)])
    require_returns([TWO], [np.array([3.0, 2.0])])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (estimated(0.5), r"values of episode 7 are \[1\], expected \[2\]: one for each decision"),
        (
            estimated(0.5, float("nan")),
            "values of episode 7 hold nan at decision 1, .* value_scale",
        ),
        (
            estimated(0.5, 0.5, bootstrap=float("inf")),
            "final observation of episode 7 is inf, expected a finite number",
        ),
    ],
)
def test_values_that_cannot_be_learnt_from_are_refused(
    values: TrajectoryValues, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        require_values([TWO], [values])


def test_returns_that_cannot_be_learnt_from_are_refused() -> None:
    with pytest.raises(ValueError, match=r"returns of episode 7 are \[2, 1\], expected \[2\]"):
        require_returns([TWO], [np.zeros((2, 1))])
    with pytest.raises(ValueError, match=r"hold -inf at decision 0, .* look at its rewards"):
        require_returns([TWO], [np.array([-np.inf, 0.0])])


def test_there_is_one_entry_for_each_trajectory() -> None:
    with pytest.raises(ValueError, match="values of 1 trajectories for 2"):
        require_values([TWO, TWO], [estimated(0.0, 0.0)])
    with pytest.raises(ValueError, match="0 returns for 1 trajectories"):
        require_returns([TWO], [])
