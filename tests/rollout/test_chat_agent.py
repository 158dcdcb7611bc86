"""The agent that talks: turns, tools, several agents, and every way in which a conversation is cut
off.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest

from vla_rl.errors import (
    ConfigError,
    ContextOverflow,
    ConversationRejected,
    EnvError,
    PolicyError,
)
from vla_rl.rollout import ChatLimits, EngineTeam, chat_agent
from vla_rl.rollout.policies import DecisionCounter, EpisodePolicy, with_unique_call_ids
from vla_rl.types import (
    ANY_REPLY,
    Completion,
    EnvSpec,
    EpisodeSpec,
    FinishReason,
    Message,
    ReplyOptions,
    Sampling,
    StopReason,
    TextOutcome,
    TextStart,
    ToolCall,
    ToolSpec,
    Trajectory,
)

EPISODE = EpisodeSpec(
    episode_id=3, group_id=0, member=0, env=EnvSpec(id="none"), task="none", seed=0, policy_seed=7
)
LOOK = ToolCall(id="call_0", name="look", arguments="{}")
TOOL = ToolSpec(name="look", description="Look.", parameters={"type": "object"})


class Speaker:
    """Says numbers in turn, two tokens each; remembers what it heard."""

    def __init__(
        self, first: int = 0, max_prompt: int = 10_000, delays: bool = False, log_prob: float = -0.5
    ) -> None:
        self.log_prob = log_prob
        self.next_number, self.max_prompt, self.delays = first, max_prompt, delays
        self.observed: list[list[str]] = []
        self.tools: list[tuple[str, ...]] = []
        self.budgets: list[int | None] = []
        self.seeds: list[int] = []

    @property
    def weight_version(self) -> int:
        return 5

    async def generate(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[ToolSpec] = (),
        sampling: Sampling | None = None,
        max_tokens: int | None = None,
        options: ReplyOptions = ANY_REPLY,
    ) -> Completion:
        self.observed.append([message.content for message in messages])
        self.tools.append(tuple(tool.name for tool in tools))
        self.budgets.append(max_tokens)
        self.seeds.append(-1 if sampling is None else sampling.seed)
        prompt = np.arange(10 * len(messages))
        if len(prompt) > self.max_prompt:
            raise ContextOverflow(len(prompt), self.max_prompt)
        if self.delays and len(self.observed) > 1:
            await asyncio.Event().wait()
        self.next_number += 1
        return Completion(
            message=Message(role="assistant", content=str(self.next_number)),
            prompt_tokens=prompt,
            tokens=np.array([self.next_number, 99]),
            log_probs=np.array([self.log_prob, -0.25], np.float32),
            weight_versions=np.array([4, 5]),
            finish_reason="stop",
        )


class Counting:
    """Ends with success at a number; says `no` before. Agents take turns."""

    def __init__(
        self, goal: int, agents: tuple[str, ...] = ("policy",), hangs_at: int | None = None
    ) -> None:
        self.goal, self.agents, self.hangs_at = goal, agents, hangs_at
        self.num_steps = 0

    @property
    def episode(self) -> EpisodeSpec:
        return EPISODE

    async def reset(self) -> TextStart:
        if self.hangs_at == 0:
            await asyncio.Event().wait()
        return TextStart(
            messages=(Message(role="user", content="count"),), tools=(TOOL,), agent=self.agents[0]
        )

    async def step(self, message: Message) -> TextOutcome:
        self.num_steps += 1
        if self.num_steps == self.hangs_at:
            await asyncio.Event().wait()
        done = message.content == str(self.goal)
        return TextOutcome(
            messages=(Message(role="user", content=f"no, not {message.content}"),),
            reward=float(done),
            terminated=done,
            truncated=False,
            info={"is_success": done, "num_steps": self.num_steps},
            agent=self.agents[self.num_steps % len(self.agents)],
        )


async def run_episode(
    env: Counting, policy: Speaker | dict[str, Speaker], **limits: float
) -> Trajectory:
    return await chat_agent(env, policy, limits=ChatLimits(**limits))  # type: ignore[arg-type]


async def test_one_turn_is_one_step() -> None:
    trajectory = await run_episode(Counting(1), Speaker())
    (step,) = trajectory.steps
    assert step.observation["prompt_tokens"].tolist() == list(range(10))
    assert step.chunk.tokens.tolist() == [1, 99]
    assert step.chunk.actions.tolist() == [[1, 99]]
    assert step.chunk.weight_versions is not None
    assert step.chunk.weight_versions.tolist() == [4, 5]
    assert step.rewards.tolist() == [1.0]
    assert (trajectory.oldest_version, trajectory.newest_version) == (4, 5)
    assert trajectory.is_success
    assert trajectory.info["last_reply"] == "1"


async def test_what_was_said_and_heard_is_in_the_next_prompt_and_tools_stay_known() -> None:
    speaker = Speaker()
    trajectory = await run_episode(Counting(3), speaker)
    assert speaker.observed[-1] == ["count", "1", "no, not 1", "2", "no, not 2"]
    assert speaker.tools == [("look",)] * 3
    assert [step.rewards.tolist() for step in trajectory.steps] == [[0.0], [0.0], [1.0]]
    assert (trajectory.info["num_turns"], trajectory.info["num_tokens"]) == (3, 6)
    assert trajectory.final_observation["prompt_tokens"].tolist() == [*range(50), 3, 99]


async def test_the_agents_limit_of_turns_cuts_off() -> None:
    trajectory = await run_episode(Counting(9), Speaker(), max_turns=2)
    assert trajectory.stop_reason is StopReason.TURN_LIMIT
    assert trajectory.stop_reason.is_cut_off
    assert len(trajectory.steps) == 2


async def test_the_limit_of_tokens_shortens_the_last_reply_and_then_cuts_off() -> None:
    speaker = Speaker()
    trajectory = await run_episode(Counting(9), speaker, max_tokens=6, max_reply=5)
    assert speaker.budgets == [5, 4, 2]
    assert trajectory.stop_reason is StopReason.TOKEN_LIMIT


async def test_a_conversation_that_outgrows_the_context_ends_with_what_it_has() -> None:
    trajectory = await run_episode(Counting(9), Speaker(max_prompt=30))
    assert trajectory.stop_reason is StopReason.TOKEN_LIMIT
    assert len(trajectory.steps) == 2


async def test_a_first_prompt_that_is_too_long_is_an_error() -> None:
    with pytest.raises(ContextOverflow, match="has 10 tokens and the context 5"):
        await run_episode(Counting(9), Speaker(max_prompt=5))


class Choosy(Speaker):
    """Its chat template rejects a conversation after some replies."""

    def __init__(self, num_replies: int, *, is_reply_at_fault: bool) -> None:
        super().__init__()
        self.num_replies, self.is_reply_at_fault = num_replies, is_reply_at_fault

    async def generate(self, messages: Sequence[Message], **options: Any) -> Completion:
        if len(self.observed) == self.num_replies:
            raise ConversationRejected("one call", is_reply_at_fault=self.is_reply_at_fault)
        return await super().generate(messages, **options)


async def test_a_reply_that_the_template_rejects_ends_the_episode_with_the_turns_before() -> None:
    trajectory = await run_episode(Counting(goal=9), Choosy(2, is_reply_at_fault=True))
    assert (trajectory.num_env_steps, trajectory.stop_reason) == (2, StopReason.REPLY_REJECTED)
    assert trajectory.info["is_success"] is False


@pytest.mark.parametrize(("num_replies", "is_reply_at_fault"), [(0, True), (2, False)])
async def test_a_template_that_rejects_what_the_environment_says_is_an_error(
    num_replies: int, is_reply_at_fault: bool
) -> None:
    with pytest.raises(ConversationRejected, match="one call"):
        await run_episode(
            Counting(goal=9), Choosy(num_replies, is_reply_at_fault=is_reply_at_fault)
        )


async def test_the_first_rejected_reply_of_a_run_is_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    counter = DecisionCounter()
    for _ in range(2):
        team = EngineTeam.from_engine(Choosy(1, is_reply_at_fault=True))
        await chat_agent(Counting(goal=9), team.make_policies(EPISODE, counter))
    (line,) = (record.message for record in caplog.records)
    assert "because of the policy's own reply: one call" in line


async def test_a_tool_that_never_answers_ends_the_episode_at_the_deadline() -> None:
    trajectory = await run_episode(Counting(9, hangs_at=2), Speaker(), step_timeout_s=0.05)
    assert trajectory.stop_reason is StopReason.DEADLINE
    assert [step.rewards.tolist() for step in trajectory.steps] == [[0.0], [0.0]]


async def test_a_reply_that_never_comes_ends_the_episode_at_the_deadline() -> None:
    trajectory = await run_episode(Counting(9), Speaker(delays=True), reply_timeout_s=0.05)
    assert trajectory.stop_reason is StopReason.DEADLINE
    assert len(trajectory.steps) == 1


class Quitter(Speaker):
    """Its n-th reply is given up after some tokens, or ends without any."""

    def __init__(self, quits_at: int, finish_reason: FinishReason, num_tokens: int) -> None:
        super().__init__()
        self.quits_at, self.finish_reason, self.num_tokens = quits_at, finish_reason, num_tokens

    async def generate(self, messages: Sequence[Message], **options: Any) -> Completion:
        reply = await super().generate(messages, **options)
        if len(self.observed) < self.quits_at:
            return reply
        num = self.num_tokens
        return msgspec.structs.replace(
            reply,
            tokens=reply.tokens[:num],
            log_probs=reply.log_probs[:num],
            weight_versions=reply.weight_versions[:num],
            finish_reason=self.finish_reason,
        )


@pytest.mark.parametrize("num_tokens", [0, 1])
async def test_a_reply_that_is_given_up_ends_the_episode_with_the_turns_before_it(
    num_tokens: int,
) -> None:
    env = Counting(9)
    trajectory = await run_episode(env, Quitter(3, "aborted", num_tokens))
    assert trajectory.stop_reason is StopReason.ABORTED
    assert trajectory.stop_reason.is_cut_off
    assert len(trajectory.steps) == env.num_steps == 2
    with pytest.raises(
        PolicyError,
        match=f"has {num_tokens} tokens and finish_reason 'aborted', expected a complete one",
    ):
        await run_episode(Counting(9), Quitter(1, "aborted", num_tokens))


async def test_a_reply_without_a_token_is_an_error_of_the_policy() -> None:
    with pytest.raises(
        PolicyError, match="a reply of 'policy' has 0 tokens and finish_reason 'stop', expected"
    ):
        await run_episode(Counting(9), Quitter(2, "stop", 0))


async def test_an_environment_that_never_begins_is_at_fault() -> None:
    with pytest.raises(EnvError, match=r"did not reset within reset_timeout_s=0.05"):
        await run_episode(Counting(9, hangs_at=0), Speaker(), reset_timeout_s=0.05)


async def test_agents_take_turns_with_their_own_policies_and_hear_their_own_conversation() -> None:
    solver, checker = Speaker(), Speaker(first=100)
    trajectory = await run_episode(
        Counting(2, agents=("solver", "checker")), {"solver": solver, "checker": checker}
    )
    assert [step.agent for step in trajectory.steps] == ["solver", "checker", "solver"]
    assert checker.observed == [["no, not 1"]]
    assert solver.observed[-1] == ["count", "1", "no, not 101"]
    assert checker.tools == [()]


class Crediting(Counting):
    """Pays the other agents at given steps."""

    def __init__(
        self, goal: int, agents: tuple[str, ...], credits: dict[int, dict[str, float]]
    ) -> None:
        super().__init__(goal, agents)
        self.credits = credits

    async def step(self, message: Message) -> TextOutcome:
        outcome = await super().step(message)
        return msgspec.structs.replace(outcome, credits=self.credits.get(self.num_steps, {}))


async def test_what_agents_earn_by_others_belongs_to_their_newest_turn_and_before_it_to_their_first() -> (
    None
):
    credits = {1: {"checker": 0.25}, 3: {"solver": 4.0}, 4: {"solver": 2.0, "checker": 8.0}}
    env = Crediting(4, ("solver", "checker"), credits)
    trajectory = await run_episode(env, Speaker())
    # solver 0; checker 0.25; solver 4 + 2; checker 1 for the last word, and 8
    assert [step.rewards.tolist() for step in trajectory.steps] == [[0.0], [0.25], [6.0], [9.0]]
    assert trajectory.returns_by_agent == {"solver": 6.0, "checker": 9.25}
    assert trajectory.undiscounted_return == 15.25


async def test_an_agent_without_a_policy_is_named() -> None:
    with pytest.raises(
        ConfigError, match=r"the turn of agent 'checker', but there are policies for \['solver'\]"
    ):
        await run_episode(Counting(9, agents=("solver", "checker")), {"solver": Speaker()})


@pytest.mark.parametrize("log_prob", [float("nan"), float("-inf"), 0.5])
async def test_a_reply_whose_log_probs_are_none_that_a_token_can_have_is_named_at_once(
    log_prob: float,
) -> None:
    policy = EpisodePolicy(Speaker(log_prob=log_prob), EPISODE)
    with pytest.raises(
        PolicyError,
        match=rf"token 0 of decision 0 of episode 3 \('none'\) is {log_prob}, with the weights after 5",
    ):
        await chat_agent(Counting(1), policy)


async def test_a_turn_knows_the_temperature_at_which_it_was_said() -> None:
    warm = msgspec.structs.replace(EPISODE, sampling=Sampling(temperature=1.3))
    policy = EpisodePolicy(Speaker(), warm)
    trajectory = await chat_agent(Counting(1), policy)
    assert trajectory.steps[0].chunk.temperature == 1.3
    colder = await policy.generate(
        [Message(role="user", content="count")], sampling=Sampling(temperature=0.7)
    )
    assert colder.temperature == 0.7


async def test_each_agent_of_a_team_has_seeds_of_its_own() -> None:
    solver, checker = Speaker(), Speaker(first=100)
    team = EngineTeam({"solver": solver, "checker": checker})
    assert team.weight_version == 5
    policies = team.make_policies(EPISODE)
    trajectory = await chat_agent(Counting(2, agents=("solver", "checker")), policies)
    assert len(trajectory.steps) == 3
    assert len({*solver.seeds, *checker.seeds}) == 3


class Caller(Speaker):
    """Calls the same tool twice in each reply, and numbers its calls from 0 each time, as chat
    formats do.
    """

    async def generate(self, messages: Sequence[Message], **options: Any) -> Completion:
        reply = await super().generate(messages, **options)
        calls = (LOOK, msgspec.structs.replace(LOOK, id="call_1"))
        return msgspec.structs.replace(
            reply, message=msgspec.structs.replace(reply.message, tool_calls=calls)
        )


class Lookout(Counting):
    """Answers every call, and remembers their ids."""

    def __init__(self) -> None:
        super().__init__(goal=3)
        self.ids: list[str] = []

    async def step(self, message: Message) -> TextOutcome:
        self.ids += [call.id for call in message.tool_calls]
        answers = tuple(
            Message(role="tool", content="a wall", tool_call_id=call.id)
            for call in message.tool_calls
        )
        return msgspec.structs.replace(await super().step(message), messages=answers)


async def test_tool_calls_are_numbered_through_the_conversation_whatever_the_engine_calls_them() -> (
    None
):
    env = Lookout()
    async with asyncio.timeout(60):
        await chat_agent(env, EpisodePolicy(Caller(), EPISODE))
    assert env.ids == ["call_0", "call_1", "call_2", "call_3", "call_4", "call_5"]


def test_only_ids_that_were_used_before_are_changed() -> None:
    asked = Message(role="user", content="look")
    said = Message(role="assistant", tool_calls=(LOOK, msgspec.structs.replace(LOOK, id="call_3")))
    unused = Message(role="assistant", tool_calls=(msgspec.structs.replace(LOOK, id="mine"),))
    assert with_unique_call_ids(said, [asked]) == said
    assert with_unique_call_ids(unused, [asked, said]) == unused
    again = with_unique_call_ids(said, [asked, said])
    assert [call.id for call in again.tool_calls] == ["call_2", "call_4"]  # call_3 is taken
    assert with_unique_call_ids(again, [asked, said]) == again
