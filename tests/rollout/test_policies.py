"""The policy of an episode: one, or one for each agent; its world may go on while it decides.

Its calls have unique ids, its replies become steps.
"""

from typing import Any

import msgspec
import numpy as np
import pytest
from rollout_fakes import CountingEngine, source
from small_episodes import mlp

from vla_rl.cli.policy_source import require_real_time
from vla_rl.errors import AgentError, ConfigError
from vla_rl.rollout import (
    DecisionCounter,
    EngineTeam,
    EpisodePolicy,
    RealTimeConfig,
    make_real_time_agent,
)
from vla_rl.rollout.agents import check_decisions, check_trajectory
from vla_rl.rollout.chat_agent import make_reply_step
from vla_rl.rollout.policies import with_unique_call_ids
from vla_rl.types import (
    SOLE_MEMBER,
    ActionChunk,
    ChunkOutcome,
    Completion,
    EnvSpec,
    EpisodeSpec,
    Message,
    Observation,
    Sampling,
    ToolCall,
    Trajectory,
)

EPISODE = source(1).next_group().episodes[0]

NUM_ROWS = 8


async def test_an_engine_is_a_team_of_one_whose_agents_get_the_policy_itself() -> None:
    team = EngineTeam.from_engine(CountingEngine())
    assert list(team.engines) == [SOLE_MEMBER]
    assert EngineTeam.from_engine(team) is team
    assert isinstance(team.make_policies(EPISODE), EpisodePolicy)


async def test_agents_of_a_team_get_a_policy_by_name() -> None:
    team = EngineTeam({"left": CountingEngine()})
    policies = team.make_policies(EPISODE)
    assert isinstance(policies, dict)
    assert list(policies) == ["left"]


def test_a_team_is_as_old_as_its_oldest_engine() -> None:
    left, right = CountingEngine(), CountingEngine()
    right.weight_version = 3
    assert EngineTeam({"left": left, "right": right}).weight_version == 0
    with pytest.raises(ValueError, match="a team has no engine"):
        EngineTeam({})


def test_time_with_several_waiting_decisions_counts_once() -> None:
    counter = DecisionCounter()
    counter.begin_decision(1.0)
    counter.begin_decision(2.0)
    assert counter.asked_s(2.5) == 1.5
    counter.end_decision(3.0)
    counter.end_decision(4.0)
    assert (counter.asked_s(9.0), counter.num_decisions, counter.num_waiting) == (3.0, 2, 0)


ENGINE_EPISODE = EpisodeSpec(
    episode_id=0,
    group_id=0,
    member=0,
    env=EnvSpec(id="none"),
    task="none",
    seed=0,
    policy_seed=0,
)


class Acting:
    weight_version = 0

    async def act(self, observation: Observation, sampling: Sampling) -> ActionChunk:
        return ActionChunk(
            actions=np.zeros((1, 1), np.float32),
            tokens=np.zeros(1, np.int64),
            log_probs=np.zeros(1, np.float32),
            weight_version=0,
        )


class Chatting:
    weight_version = 0

    async def generate(self, *args: object, **kwargs: object) -> Completion:
        raise NotImplementedError


async def test_an_engine_that_chats_is_not_asked_for_actions() -> None:
    with pytest.raises(TypeError, match="generates text and has no `act`; use `generate`"):
        await EpisodePolicy(Chatting(), ENGINE_EPISODE).act({})


async def test_an_engine_that_acts_is_not_asked_for_replies() -> None:
    policy = EpisodePolicy(Acting(), ENGINE_EPISODE)
    with pytest.raises(TypeError, match="does not generate text; use `act`"):
        await policy.generate("hello")
    assert (await policy.act({})).weight_version == 0  # and a refusal takes no decision's seed


def calling(*ids: str) -> Message:
    calls = tuple(ToolCall(id=id, name="add", arguments=f'"{id}"') for id in ids)
    return Message(role="assistant", tool_calls=calls)


def ids_of(message: Message) -> list[str]:
    return [call.id for call in message.tool_calls]


def test_new_ids_stay_as_the_model_wrote_them() -> None:
    reply = calling("mine")
    assert with_unique_call_ids(reply, [calling("call_0")]) is reply


def test_ids_that_were_used_are_numbered_on_from_the_conversation() -> None:
    reply = with_unique_call_ids(calling("call_0", "call_1"), [calling("call_0", "call_1")])
    assert ids_of(reply) == ["call_2", "call_3"]
    assert [call.arguments for call in reply.tool_calls] == ['"call_0"', '"call_1"']


def test_a_number_that_the_conversation_has_already_is_passed_over() -> None:
    assert ids_of(with_unique_call_ids(calling("x"), [calling("x", "call_2")])) == ["call_3"]


REPLY = Completion(
    message=Message(role="assistant", content="4"),
    prompt_tokens=np.array([1, 2]),
    tokens=np.array([3, 4, 5]),
    log_probs=np.array([-0.1, -0.2, -0.3], np.float32),
    weight_versions=np.array([7, 6, 8]),
    finish_reason="stop",
    temperature=0.7,
)


def test_the_prompt_is_the_observation_and_the_reply_the_action() -> None:
    step = make_reply_step(REPLY, "solver", reward=0.5)
    assert step.agent == "solver"
    assert step.rewards.dtype == np.float32
    assert step.rewards.tolist() == [0.5]
    assert step.observation.keys() == {"prompt_tokens"}
    assert step.observation["prompt_tokens"].tolist() == [1, 2]
    assert step.chunk.actions.tolist() == [[3, 4, 5]]
    assert step.chunk.log_probs.tolist() == REPLY.log_probs.tolist()
    assert step.chunk.temperature == 0.7


def test_a_reply_is_as_stale_as_its_oldest_token() -> None:
    chunk = make_reply_step(REPLY, "solver", reward=0.0).chunk
    assert chunk.weight_version == 6
    assert chunk.weight_versions is not None
    assert chunk.weight_versions.tolist() == [7, 6, 8]


def test_the_grammar_that_restricted_sampling_is_observed_too() -> None:
    restricted = msgspec.structs.replace(REPLY, grammar='start: "4"')
    assert make_reply_step(restricted, "solver", 0.0).observation["grammar"] == 'start: "4"'


class CountingEnv:
    """A world that lasts for 12 control steps; it notes the actions, and shows how many it has seen."""

    def __init__(self) -> None:
        self.episode = EpisodeSpec(
            episode_id=0,
            group_id=0,
            member=0,
            env=EnvSpec(id="none"),
            task="none",
            seed=0,
            policy_seed=0,
        )
        self.actions: list[float] = []

    async def reset(self) -> tuple[Observation, dict[str, Any]]:
        return self._observe(), {}

    async def step_chunk(self, actions: np.ndarray, **_: Any) -> ChunkOutcome:
        self.actions += actions[:, 0].tolist()
        return ChunkOutcome(
            observation=self._observe(),
            rewards=np.zeros(len(actions), np.float32),
            terminated=False,
            truncated=len(self.actions) >= 12,
            info={},
        )

    def _observe(self) -> Observation:
        return {"state": np.array([len(self.actions)], np.float32)}


class NumberedPolicy:
    """Its n-th chunk has the actions 100 n, 100 n + 1, ...; it notes what it was shown."""

    def __init__(self) -> None:
        self.seen: list[Observation] = []

    async def act(self, observation: Observation, sampling: Sampling | None = None) -> ActionChunk:
        self.seen.append(observation)
        actions = 100.0 * len(self.seen) + np.arange(NUM_ROWS, dtype=np.float32)[:, None]
        return ActionChunk(
            actions=actions,
            tokens=actions.reshape(-1),
            log_probs=np.full(NUM_ROWS, -1.0, np.float32),
            weight_version=3,
        )


async def run(**settings: Any) -> tuple[CountingEnv, NumberedPolicy, Trajectory]:
    env, policy = CountingEnv(), NumberedPolicy()
    agent = make_real_time_agent(RealTimeConfig(**settings))
    return env, policy, await agent(env, policy)  # type: ignore[arg-type]


async def test_the_rest_of_the_old_chunk_runs_while_the_policy_decides() -> None:
    env, policy, trajectory = await run(delay=2, executed_rows=4)
    first = [100.0, 101.0, 102.0, 103.0]
    assert env.actions == [*first, 104.0, 105.0, 202.0, 203.0, 204.0, 205.0, 302.0, 303.0]
    assert "planned_actions" not in policy.seen[0]
    # it is asked with what was seen when the delay began, and what is left from then on
    assert policy.seen[1]["state"].tolist() == [4.0]
    assert policy.seen[1]["planned_actions"][:, 0].tolist() == [104.0, 105.0, 106.0, 107.0]
    assert policy.seen[1]["delay"] == 2
    assert [step.chunk.actions[0, 0] for step in trajectory.steps] == [100.0, 104.0, 204.0]


async def test_naive_switching_asks_for_a_chunk_that_is_drawn_anew() -> None:
    env, policy, _ = await run(delay=2, executed_rows=4, continues_plan=False)
    assert env.actions[4:8] == [104.0, 105.0, 202.0, 203.0]
    assert all(set(seen) == {"state"} for seen in policy.seen)


async def test_its_trajectories_pass_the_checks_of_agents() -> None:
    _, _, trajectory = await run(delay=2, executed_rows=4)
    check_trajectory(trajectory, "an episode")
    check_decisions(trajectory, "an episode", lambda agent: None)
    assert all(step.chunk.log_probs.sum() == 0.0 for step in trajectory.steps)
    # what was observed is what a recording shows: the plan is the robot's, not the world's
    assert all(set(step.observation) == {"state"} for step in trajectory.steps)


async def test_half_of_a_chunk_is_executed_by_default() -> None:
    env, _, _ = await run(delay=4)
    assert env.actions == [
        *range(100, 108),
        204.0,
        205.0,
        206.0,
        207.0,
    ]


def test_an_evaluation_refuses_a_plan_that_a_policy_cannot_continue() -> None:
    policy = mlp()
    with pytest.raises(
        ConfigError, match=r"MlpPolicy, which cannot continue .*--real-time.no-continues-plan"
    ):
        require_real_time(policy, "folder", RealTimeConfig(delay=1))
    require_real_time(policy, "folder", RealTimeConfig())
    naive = RealTimeConfig(delay=policy.config.chunk_size, continues_plan=False)
    with pytest.raises(AgentError, match="take longer chunks"):
        require_real_time(policy, "folder", naive)


async def test_a_chunk_that_ends_before_the_decision_is_refused() -> None:
    with pytest.raises(AgentError, match=r"8 rows, expected at least 6 .* and 3 .*--chunk-size"):
        await run(delay=3, executed_rows=6)
    with pytest.raises(ConfigError, match="at least delay, 4"):
        RealTimeConfig(delay=4, executed_rows=3)
