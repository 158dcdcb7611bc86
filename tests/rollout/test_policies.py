"""The policy of an episode: one, or one for each agent; its calls have unique ids, its replies become steps."""

import msgspec
import numpy as np
import pytest
from rollout_fakes import CountingEngine, source

from vla_rl.rollout import DecisionCounter, EngineTeam, EpisodePolicy
from vla_rl.rollout.chat_agent import make_reply_step
from vla_rl.rollout.policies import with_unique_call_ids
from vla_rl.types import (
    SOLE_MEMBER,
    ActionChunk,
    Completion,
    EnvSpec,
    EpisodeSpec,
    Message,
    Observation,
    Sampling,
    ToolCall,
)

EPISODE = source(1).next_group().episodes[0]


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
