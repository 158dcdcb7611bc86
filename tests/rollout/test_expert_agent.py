"""An expert acts at the decisions that a coin or a stall gives it, every decision says who acted, and an expert
that fails costs one attempt or one clear error.
"""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from vla_rl.errors import ActorDied, AgentError
from vla_rl.remote_rollout.host_recipe import make_agent, make_agent_recipe
from vla_rl.rollout import EpisodePolicy
from vla_rl.rollout.agents import check_decisions
from vla_rl.rollout.expert_agent import (
    InterventionConfig,
    Takeover,
    expert_agent,
    make_expert_agent,
)
from vla_rl.rollout.experts import Expert, ExpertFailed, PolicyExpert, SuggestedExpert
from vla_rl.types import (
    ActionChunk,
    ChunkOutcome,
    EnvSpec,
    EpisodeSpec,
    Info,
    Observation,
    Sampling,
    StopReason,
    Trajectory,
)

HORIZON = 4


def episode(policy_seed: int = 0) -> EpisodeSpec:
    return EpisodeSpec(
        episode_id=7, group_id=0, member=0, env=EnvSpec(id="line"), task="line", seed=0, policy_seed=policy_seed
    )  # fmt: skip


class Line:
    """A point at 0 that has to come to 1; a control step moves it by its action, at most 0.1.

    The suggestion is the step to the goal at full speed.
    """

    def __init__(self, spec: EpisodeSpec, limit: int = 40) -> None:
        self.episode, self._limit = spec, limit
        self.num_calls = 0

    async def reset(self) -> tuple[Observation, Info]:
        self._position, self._num_steps = 0.0, 0
        return self._observe(), {}

    async def step(self, action: np.ndarray) -> Any:
        raise NotImplementedError

    async def step_chunk(
        self, actions: np.ndarray, *, frames_every: int | None = None
    ) -> ChunkOutcome:
        self.num_calls += 1
        rewards: list[float] = []
        for row in actions:
            self._position += float(np.clip(row[0], -0.1, 0.1))
            self._num_steps += 1
            rewards.append(float(self._position > 0.999))
            if rewards[-1] or self._num_steps == self._limit:
                break
        return ChunkOutcome(
            observation=self._observe(),
            rewards=np.array(rewards, np.float32),
            terminated=bool(rewards[-1]),
            truncated=not rewards[-1] and self._num_steps == self._limit,
            info={"is_success": bool(rewards[-1])},
        )

    def _observe(self) -> Observation:
        # its own suggestion differs from state to state, so a test can tell them apart
        return {
            "state": np.float32([self._position]),
            "expert_action": np.float32([0.1 - 0.01 * self._position]),
        }


class Constant:
    """A policy that always moves by `move`, and notes what it saw."""

    weight_version = 3

    def __init__(self, move: float) -> None:
        self._move = move
        self.seen: list[Observation] = []

    async def act(self, observation: Observation, sampling: Sampling) -> ActionChunk:
        self.seen.append(observation)
        return ActionChunk(
            actions=np.full((HORIZON, 1), self._move, np.float32),
            tokens=np.arange(HORIZON),
            log_probs=np.full(HORIZON, -0.5, np.float32),
            weight_version=3,
        )


async def run(
    config: InterventionConfig,
    *,
    move: float = -0.02,
    expert: Expert | None = None,
    seed: int = 0,
    make_takeover: Callable[[EpisodeSpec], Takeover] | None = None,
) -> Trajectory:
    spec = episode(seed)
    agent = make_expert_agent(expert or SuggestedExpert(), config, make_takeover)
    async with asyncio.timeout(60):
        trajectory = await agent(Line(spec), EpisodePolicy(Constant(move), spec))
    check_decisions(trajectory, "the episode", lambda agent: None)
    return trajectory


def who_acted(trajectory: Trajectory) -> list[bool]:
    chosen = [step.intervened for step in trajectory.steps]
    assert all(each is not None and each.min() == each.max() for each in chosen)
    return [bool(each[0]) for each in chosen if each is not None]


async def test_an_expert_that_always_acts_solves_the_task_and_its_steps_count() -> None:
    trajectory = await run(InterventionConfig(beta=1.0))
    assert trajectory.stop_reason is StopReason.SUCCESS
    assert trajectory.num_env_steps == trajectory.info["expert_steps"] == 11
    assert who_acted(trajectory) == [True, True, True]
    assert trajectory.num_executed_tokens == 0  # nothing of it is the policy's
    for step in trajectory.steps:
        assert step.expert_actions is not None
        assert np.array_equal(step.chunk.actions, step.expert_actions)


async def test_a_policy_is_alone_without_the_coin_and_every_decision_is_labelled() -> None:
    trajectory = await run(InterventionConfig(beta=0.0))
    assert who_acted(trajectory) == [False] * 10
    assert trajectory.info["expert_steps"] == 0
    first = trajectory.steps[0]
    assert first.chunk.actions[:, 0].tolist() == pytest.approx([-0.02] * 4)
    assert first.expert_actions is not None
    # row j: in the state that the policy's own rows reach, not that which the expert's would
    expected = [0.1 - 0.01 * position for position in (0.0, -0.02, -0.04, -0.06)]
    assert first.expert_actions[:, 0].tolist() == pytest.approx(expected)


async def test_labels_of_the_expert_s_own_decisions_alone_leave_the_others_without() -> None:
    trajectory = await run(InterventionConfig(beta=0.5, labels="acted"))
    acted = who_acted(trajectory)
    assert {True, False} == set(acted)
    assert [step.expert_actions is not None for step in trajectory.steps] == acted


async def test_a_policy_s_chunk_runs_at_once_if_it_needs_no_label() -> None:
    spec = episode()
    env = Line(spec)
    agent = make_expert_agent(SuggestedExpert(), InterventionConfig(beta=0.0, labels="acted"))
    trajectory = await agent(env, EpisodePolicy(Constant(-0.02), spec))
    assert env.num_calls == len(trajectory.steps) == 10


async def test_the_coin_depends_on_the_episode_s_seed_and_falls_with_updates() -> None:
    first, again, other = [
        who_acted(await run(InterventionConfig(beta=0.5), seed=seed)) for seed in (1, 1, 2)
    ]
    assert first == again
    assert first != other
    # the policy has 3 updates: 0.9 * 0.01^3
    assert not any(who_acted(await run(InterventionConfig(beta=0.9, beta_decay=0.01))))


@pytest.mark.parametrize(("move", "is_labelled"), [(-0.02, True), (0.1, False)])
async def test_a_share_of_episodes_is_the_policy_s_own_and_labelled_where_it_fails(
    move: float, is_labelled: bool
) -> None:
    config = InterventionConfig(beta=1.0, alone=0.5)
    episodes = [await run(config, move=move, seed=seed) for seed in range(20)]
    alone = [each for each in episodes if not any(who_acted(each))]
    assert 4 <= len(alone) <= 16
    labels = [step.expert_actions is not None for each in alone for step in each.steps]
    assert set(labels) == {is_labelled}
    assert all(all(who_acted(each)) for each in episodes if each not in alone)


async def test_the_policy_does_not_see_what_the_expert_suggests_and_rows_do_not_hold_it() -> None:
    spec, policy = episode(), Constant(-0.02)
    trajectory = await expert_agent(Line(spec), EpisodePolicy(policy, spec))
    seen = [*policy.seen, *(step.observation for step in trajectory.steps)]
    assert all(set(each) == {"state"} for each in [*seen, trajectory.final_observation])


async def test_an_expert_takes_over_when_the_policy_stands_still_and_gives_control_back() -> None:
    config = InterventionConfig(takeover="stall", patience=2, min_move=0.01, hold=1)
    trajectory = await run(config, move=0.0)
    # two decisions without progress, then one of the expert's, which moves by 0.4
    assert who_acted(trajectory) == [False, False, True] * 2 + [False, False, True]
    assert trajectory.is_success
    assert who_acted(await run(config, move=0.05)) == [False] * 5


async def test_an_expert_takes_over_when_it_is_late_and_stays() -> None:
    config = InterventionConfig(takeover="stall", latest=3)
    assert who_acted(await run(config)) == [False] * 3 + [True] * 4


async def test_another_policy_labels_every_decision_without_acting() -> None:
    expert = PolicyExpert(Constant(0.09))
    trajectory = await run(InterventionConfig(beta=0.0), expert=expert)
    for step in trajectory.steps:
        assert step.expert_actions is not None
        assert step.expert_actions[:, 0].tolist() == pytest.approx([0.09] * 4)
    assert len(trajectory.steps) == 10
    helped = await run(InterventionConfig(beta=1.0), expert=expert)
    assert helped.is_success
    assert helped.num_env_steps == helped.info["expert_steps"] == 12


class Person:
    """Acts in the first two decisions; both seams are one object, as a person's device is."""

    async def act(self, observation: Observation) -> np.ndarray:
        await asyncio.sleep(0)
        return np.float32([[0.1], [0.05]])

    def wants_control(self, decision: int, observation: Observation, chunk: ActionChunk) -> bool:
        return decision < 2


async def test_a_person_decides_who_acts_and_acts() -> None:
    person = Person()
    trajectory = await run(
        InterventionConfig(labels="acted"), expert=person, make_takeover=lambda episode: person
    )
    assert who_acted(trajectory)[:3] == [True, True, False]
    first = trajectory.steps[0].expert_actions
    assert first is not None
    assert first[:, 0].tolist() == pytest.approx([0.1, 0.05, 0.1, 0.05])


class Answering:
    """An expert that answers one thing."""

    def __init__(self, answer: Any) -> None:
        self._answer = answer

    async def act(self, observation: Observation) -> np.ndarray:
        if isinstance(self._answer, Exception):
            raise self._answer
        if self._answer is None:
            await asyncio.sleep(60)
        answer: np.ndarray = self._answer
        return answer


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (ZeroDivisionError("a plan of length 0"), "Answering: it raised ZeroDivisionError: a plan"),
        (TimeoutError("its own"), "Answering: it raised TimeoutError: its own"),
        (None, r"expert Answering: no answer within 0.01 s"),
    ],
)
async def test_an_expert_that_raises_or_is_late_loses_the_episode_and_not_the_run(
    answer: Any, message: str
) -> None:
    with pytest.raises(ExpertFailed, match=message) as caught:
        await run(InterventionConfig(timeout_s=0.01), expert=Answering(answer))
    # what the scheduler runs again
    assert isinstance(caught.value, ActorDied)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (np.zeros((4, 2)), r"answered float64 \[4, 2\], expected numbers \[K, 1\]"),
        (np.zeros(1), r"answered float64 \[1\], expected numbers \[K, 1\]"),
        (np.zeros((0, 1)), r"answered float64 \[0, 1\], expected numbers \[K, 1\] with K >= 1"),
        ([[0.1]], r"answered a list \[\[0.1\]\], expected numbers"),
        (np.array([["a"]]), r"answered <U1 \[1, 1\], expected numbers"),
        (np.float32([[np.nan]]), "answered NaN or infinity, expected finite numbers"),
    ],
)
async def test_an_answer_that_no_state_would_change_is_an_error_at_once(
    answer: Any, message: str
) -> None:
    with pytest.raises(AgentError, match=message):
        await run(InterventionConfig(), expert=Answering(answer))


async def test_an_agent_with_the_scripted_expert_runs_on_other_hosts_too() -> None:
    agent = partial(expert_agent, intervention=InterventionConfig(beta=1.0))
    spec = episode()
    there = make_agent(make_agent_recipe(agent))
    trajectory = await there(Line(spec), EpisodePolicy(Constant(0.0), spec))
    assert trajectory.info["expert_steps"] == 11


class WithoutSuggestions(Line):
    def _observe(self) -> Observation:
        return {"image": np.zeros((2, 2, 3), np.uint8)}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (InterventionConfig(), "expected 'expert_action'; use an environment with suggestions"),
        (InterventionConfig(takeover="stall"), "expected 'state', by which a stall is seen"),
    ],
)
async def test_an_environment_that_lacks_what_is_read_is_an_error_at_once(
    config: InterventionConfig, message: str
) -> None:
    spec = episode()
    with pytest.raises(AgentError, match=message):
        await expert_agent(
            WithoutSuggestions(spec), EpisodePolicy(Constant(0.0), spec), intervention=config
        )
