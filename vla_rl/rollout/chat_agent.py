"""The agent for text environments, with any number of turns, tools and agents.

    reset ─► generate ─► step ─► generate ─► ... ─► terminated, truncated, or a limit

Every turn is one `Step`: the prompt, the reply, its log-probs and weight versions, and its reward.
If several agents share the environment, each replies by its own policy and has its own
conversation.
"""

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from vla_rl.errors import (
    ConfigError,
    ContextOverflow,
    ConversationRejected,
    EnvError,
    PolicyError,
)
from vla_rl.rollout.agents import stop_reason
from vla_rl.types import (
    ANY_REPLY,
    ActionChunk,
    AgentNames,
    Completion,
    Config,
    LanguagePolicies,
    LanguagePolicy,
    Message,
    PositiveFloat,
    PositiveInt,
    ReplyOptions,
    Step,
    StopReason,
    TextEnv,
    TextOutcome,
    TextStart,
    ToolSpec,
    Trajectory,
    get_images,
    key_by_member,
    make_conversation_observation,
)
from vla_rl.util.tasks import TookTooLong, limit_time


def make_reply_step(reply: Completion, agent: str, reward: float) -> Step:
    """Return one decision: the prompt as its observation, the whole reply as its action.

    `observation["grammar"]` is the grammar that sampling was restricted to, if there was one: a
    learner computes the log-probs of the same restricted distribution.
    """
    observation = make_conversation_observation(
        reply.prompt_tokens, reply.images, reply.image_starts
    )
    if reply.grammar is not None:
        observation |= {"grammar": reply.grammar}
    chunk = ActionChunk(
        actions=reply.tokens[None],
        tokens=reply.tokens,
        log_probs=reply.log_probs,
        # The oldest version of its tokens: new weights may arrive in the middle of a reply, and
        # staleness is bounded by the worst.
        weight_version=int(reply.weight_versions.min()),
        weight_versions=reply.weight_versions,
        temperature=reply.temperature,
    )
    return Step(
        observation=observation, chunk=chunk, rewards=np.array([reward], np.float32), agent=agent
    )


class ChatLimits(Config, frozen=True, kw_only=True):
    """Limits at which a conversation is cut off."""

    max_turns: PositiveInt = 16
    """Most replies in an episode, of all agents together."""

    max_tokens: PositiveInt | None = None
    """Most tokens of all replies of an episode together; the last reply is cut short. None: no
    limit."""

    max_reply: PositiveInt | None = None
    """Most tokens of one reply; None: the engine's own limit."""

    reset_timeout_s: PositiveFloat = 120.0
    """Most seconds for the environment to reset. There is nothing to train on yet, so exceeding it
    raises an EnvError."""

    reply_timeout_s: PositiveFloat | None = None
    """Most seconds for one reply, with its wait for a place in the batch. If exceeded, the episode
    ends with the turns before it. None: no limit."""

    step_timeout_s: PositiveFloat | None = 120.0
    """Most seconds for the environment to answer a reply: tools, scorers. If exceeded, the episode
    ends and that turn's reward is 0. None: no limit."""


async def chat_agent(
    env: TextEnv,
    policy: LanguagePolicies,
    *,
    limits: ChatLimits | None = None,
) -> Trajectory:
    """Run one episode of a text environment.

    `functools.partial(chat_agent, limits=ChatLimits(max_turns=4))` is an agent with other limits.

    Args:
        env: the environment, leased for the episode.
        policy: one for all agents, or one for each agent by its name.
        limits: when the conversation is cut off.

    Returns: one step a turn, of all agents, in order; a reward that an agent gets later, through
        the others, is added to its newest turn. `info` is that of the environment's last answer,
        with `num_turns`, `num_tokens` and `last_reply`, the text of the last turn.
    Raises: ContextOverflow if the very first prompt leaves no room; EnvError if the environment
        does not reset in time, or names an agent that has no policy; TimeoutError if the very first
        reply does not come in time; PolicyError if the engine aborts that reply, or any reply has
        no token. A later reply that is aborted ends the episode with the turns before it, because
        half a reply cannot be trained on; ConversationRejected if the policy's chat template rejects
        what the environment says. If the policy's own replies are the cause, the episode ends with
        `StopReason.REPLY_REJECTED` instead.
    """
    episode = _Conversation(env, policy, limits or ChatLimits())
    return await episode.hold_conversation()


class _Conversation:
    """One episode: the conversation of each agent, and the turns so far."""

    def __init__(
        self,
        env: TextEnv,
        policy: LanguagePolicies,
        limits: ChatLimits,
    ) -> None:
        self._env, self._limits = env, limits
        self._policies = key_by_member(policy)
        self._agent_names = AgentNames(self._policies)
        self._messages: dict[str, list[Message]] = {}
        self._tools: dict[str, tuple[ToolSpec, ...]] = {}
        self._options: ReplyOptions = ANY_REPLY
        self._steps: list[Step] = []
        self._newest: dict[str, int] = {}
        self._owed: dict[str, float] = {}
        self._num_tokens = 0
        self._info: dict[str, Any] = {}
        self._last_reply = ""

    async def hold_conversation(self) -> Trajectory:
        agent = await self._begin()
        while True:
            reply = await self._reply(agent)
            if isinstance(reply, StopReason):
                return self._ended(reply)
            self._messages[agent].append(reply.message)
            self._last_reply = reply.message.content
            outcome = await self._answer(reply.message)
            # Recorded before the end is looked at: the tokens were generated, whatever the
            # environment made of them.
            self._record(agent, reply, 0.0 if outcome is None else outcome.reward)
            if outcome is None:
                return self._ended(StopReason.DEADLINE)
            self._credit(outcome.credits)
            self._info = outcome.info
            if outcome.terminated or outcome.truncated:
                return self._ended(stop_reason(outcome.terminated, outcome.info))
            if len(self._steps) >= self._limits.max_turns:
                return self._ended(StopReason.TURN_LIMIT)
            agent = self._take_turn(outcome)

    async def _begin(self) -> str:
        limit = self._limits.reset_timeout_s
        try:
            start = await limit_time(limit, self._env.reset())
        except TookTooLong as error:
            raise EnvError(
                f"the environment of {self._env.episode.task} did not reset within "
                f"reset_timeout_s={limit}; look at what its reset waits for, or raise the limit"
            ) from error
        return self._take_turn(start)

    def _take_turn(self, said: TextStart | TextOutcome) -> str:
        """Append messages to an agent's conversation, make it its turn, and return its name."""
        self._messages.setdefault(said.agent, []).extend(said.messages)
        if said.tools:
            self._tools[said.agent] = said.tools
        self._options = said.options
        return said.agent

    async def _reply(self, agent: str) -> Completion | StopReason:
        """Return an agent's reply, or the reason why there is none."""
        budget = self._limits.max_reply
        if self._limits.max_tokens is not None:
            left = self._limits.max_tokens - self._num_tokens
            if left < 1:
                return StopReason.TOKEN_LIMIT
            budget = left if budget is None else min(budget, left)
        speaker = self._find_policy(agent)
        generation = speaker.generate(
            self._messages[agent],
            tools=self._tools.get(agent, ()),
            max_tokens=budget,
            options=self._options,
        )
        try:
            reply = await limit_time(self._limits.reply_timeout_s, generation)
        except ContextOverflow:
            if not self._steps:
                raise
            return StopReason.TOKEN_LIMIT
        except ConversationRejected as error:
            # What the environment says is its author's fault and would come again in each episode:
            # that ends the run, a policy's own reply does not.
            if not self._steps or not error.is_reply_at_fault:
                raise
            return StopReason.REPLY_REJECTED
        except TookTooLong as error:
            if not self._steps:
                raise TimeoutError(
                    "the first reply did not come within "
                    f"reply_timeout_s={self._limits.reply_timeout_s}"
                ) from error
            return StopReason.DEADLINE
        if reply.finish_reason == "aborted" and self._steps:
            return StopReason.ABORTED
        if reply.finish_reason == "aborted" or not len(reply.tokens):
            raise PolicyError(
                f"a reply of {agent!r} has {len(reply.tokens)} tokens and finish_reason "
                f"{reply.finish_reason!r}, expected a complete one of at least one token; find out "
                "why the engine aborts replies, and have it repeat them"
            )
        return reply

    async def _answer(self, message: Message) -> TextOutcome | None:
        """Return the environment's answer to a reply; None if it took too long."""
        try:
            return await limit_time(self._limits.step_timeout_s, self._env.step(message))
        except TookTooLong:
            return None

    def _record(self, agent: str, reply: Completion, reward: float) -> None:
        self._num_tokens += len(reply.tokens)
        self._newest[agent] = len(self._steps)
        self._steps.append(make_reply_step(reply, agent, reward + self._owed.pop(agent, 0.0)))

    def _credit(self, credits: Mapping[str, float]) -> None:
        """Add rewards for earlier actions to the agents' newest turns.

        Those without a turn get it with their first.
        """
        for agent, earned in credits.items():
            # In a game of several agents the first move may pay the one who has not moved yet.
            if agent not in self._newest:
                self._owed[agent] = self._owed.get(agent, 0.0) + earned
                continue
            step = self._steps[self._newest[agent]]
            self._steps[self._newest[agent]] = msgspec.structs.replace(
                step, rewards=step.rewards + np.float32(earned)
            )

    def _ended(self, reason: StopReason) -> Trajectory:
        last = self._steps[-1]
        seen = np.concatenate([last.observation["prompt_tokens"], last.chunk.tokens])
        return Trajectory(
            episode=self._env.episode,
            steps=tuple(self._steps),
            final_observation=make_conversation_observation(
                seen, get_images(last.observation), last.observation.get("image_starts", ())
            ),
            stop_reason=reason,
            info={
                # An episode that a limit cut off has not solved its task: without the key it would
                # be left out of the success rate, which would then rise with the number of cut
                # episodes.
                **({} if reason.is_of_environment else {"is_success": False}),
                **self._info,
                "last_reply": self._last_reply,
                "num_turns": len(self._steps),
                "num_tokens": self._num_tokens,
            },
        )

    def _find_policy(self, agent: str) -> LanguagePolicy:
        try:
            return self._policies[self._agent_names.get_member(agent)]
        except KeyError:
            raise ConfigError(
                f"it is the turn of agent {agent!r}, but there are policies for "
                f"{sorted(self._policies)}; expected one for each agent that the environment names"
            ) from None
