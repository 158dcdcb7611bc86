"""The agent that talks: it plays any text environment, with as many turns, tools and agents as that has.

    reset ─► generate ─► step ─► generate ─► ... ─► terminated, truncated, or a limit

Every turn is one `Step`: what was fed, what was said, its log-probs and versions, and what it earned. Where several agents
share the environment, each speaks by its own policy and hears its own conversation.
"""

import asyncio
from collections.abc import Awaitable, Mapping
from typing import Any, TypeVar

import msgspec
import numpy as np

from vla_rl.errors import ConfigError, ContextOverflow, EnvError, PolicyError
from vla_rl.rollout.agents import stop_reason
from vla_rl.rollout.reply_steps import step_of
from vla_rl.types import (
    ANY_REPLY,
    Completion,
    Config,
    LanguagePolicy,
    Message,
    ReplyOptions,
    Step,
    StopReason,
    TextEnv,
    TextOutcome,
    TextStart,
    ToolSpec,
    Trajectory,
)

T = TypeVar("T")


class ChatLimits(Config, frozen=True, kw_only=True):
    """Where a conversation is cut off."""

    max_turns: int = 16
    """Replies in an episode, of all agents together."""

    max_tokens: int | None = None
    """Tokens of all replies of an episode together; the last one is cut short. None: no limit."""

    max_reply: int | None = None
    """Tokens of one reply; none leaves it to the engine."""

    reset_timeout_s: float = 120.0
    """For the environment to begin. There is nothing to train on yet, so exceeding it is an error of the environment."""

    reply_timeout_s: float | None = None
    """For one reply, its wait for a place in the batch included. Exceeded, the episode ends with what it has."""

    step_timeout_s: float | None = 120.0
    """For the environment to answer a reply: tools, scorers. Exceeded, the episode ends there, and that turn earns 0."""

    def __post_init__(self) -> None:
        self.require(self.max_turns >= 1, "max_turns", "at least 1 turn")
        self.require(self.max_tokens is None or self.max_tokens >= 1, "max_tokens", "at least 1 token, or none")
        self.require(self.max_reply is None or self.max_reply >= 1, "max_reply", "at least 1 token, or none")
        self.require(self.reset_timeout_s > 0, "reset_timeout_s", "above 0 seconds")
        for field in ("reply_timeout_s", "step_timeout_s"):
            value = getattr(self, field)
            self.require(value is None or value > 0, field, "above 0 seconds, or none")


async def chat_agent(
    env: TextEnv, policy: LanguagePolicy | Mapping[str, LanguagePolicy], *, limits: ChatLimits | None = None
) -> Trajectory:
    """Play one episode of a text environment.

    `functools.partial(chat_agent, limits=ChatLimits(max_turns=4))` is an agent with other limits.

    Args:
        env: leased for the episode.
        policy: one for everybody, or one for each agent by its name.
        limits: where a conversation is cut off.

    Returns: one step a turn, in order, whoever spoke; what an agent earns later, through the others, is added to its newest
        turn. `info` is that of the environment's last answer, with `num_turns`,
        `num_tokens` and `last_reply`, the text of the last turn.
    Raises: ContextOverflow where the very first prompt leaves no room; EnvError where the environment does not begin in
        time, or asks for an agent that has no policy; TimeoutError where the very first reply does not come in time;
        PolicyError where the engine gives that one up, or any reply has no token. One that is given up later ends the
        episode with the turns before it, as half a reply is none to learn from.
    """
    episode = _Conversation(env, policy, limits or ChatLimits())
    return await episode.play()


class _Conversation:
    """One episode: who has heard what, and what happened so far."""

    def __init__(self, env: TextEnv, policy: LanguagePolicy | Mapping[str, LanguagePolicy], limits: ChatLimits) -> None:
        self._env, self._policy, self._limits = env, policy, limits
        self._messages: dict[str, list[Message]] = {}
        self._tools: dict[str, tuple[ToolSpec, ...]] = {}
        self._options: ReplyOptions = ANY_REPLY
        self._steps: list[Step] = []
        self._newest: dict[str, int] = {}
        self._owed: dict[str, float] = {}
        self._num_tokens = 0
        self._info: dict[str, Any] = {}
        self._last_reply = ""

    async def play(self) -> Trajectory:
        agent = await self._begin()
        while True:
            reply = await self._reply(agent)
            if isinstance(reply, StopReason):
                return self._ended(reply)
            self._messages[agent].append(reply.message)
            self._last_reply = reply.message.content
            outcome = await self._answer(reply.message)
            self._record(agent, reply, 0.0 if outcome is None else outcome.reward)
            if outcome is None:
                return self._ended(StopReason.DEADLINE)
            self._credit(outcome.credits)
            self._info = outcome.info
            if outcome.terminated or outcome.truncated:
                return self._ended(stop_reason(outcome.terminated, outcome.info))
            if len(self._steps) >= self._limits.max_turns:
                return self._ended(StopReason.TURN_LIMIT)
            agent = self._hear(outcome)

    async def _begin(self) -> str:
        limit = self._limits.reset_timeout_s
        try:
            start = await _within(limit, self._env.reset())
        except _TookTooLong as error:
            raise EnvError(
                f"the environment of {self._env.episode.task} did not begin within reset_timeout_s={limit}; look at "
                "what its reset waits for, or allow more"
            ) from error
        return self._hear(start)

    def _hear(self, said: TextStart | TextOutcome) -> str:
        """An agent hears something, and it is its turn."""
        self._messages.setdefault(said.agent, []).extend(said.messages)
        if said.tools:
            self._tools[said.agent] = said.tools
        self._options = said.options
        return said.agent

    async def _reply(self, agent: str) -> Completion | StopReason:
        """What an agent says, or why it says nothing more."""
        budget = self._limits.max_reply
        if self._limits.max_tokens is not None:
            left = self._limits.max_tokens - self._num_tokens
            if left < 1:
                return StopReason.TOKEN_LIMIT
            budget = left if budget is None else min(budget, left)
        speaker = self._policy_of(agent)
        generation = speaker.generate(
            self._messages[agent], tools=self._tools.get(agent, ()), max_tokens=budget, options=self._options
        )
        try:
            reply = await _within(self._limits.reply_timeout_s, generation)
        except ContextOverflow:
            if not self._steps:
                raise
            return StopReason.TOKEN_LIMIT
        except _TookTooLong as error:
            if not self._steps:
                raise TimeoutError(
                    f"the first reply did not come within reply_timeout_s={self._limits.reply_timeout_s}"
                ) from error
            return StopReason.DEADLINE
        if reply.finish_reason == "aborted" and self._steps:
            return StopReason.ABORTED
        if reply.finish_reason == "aborted" or not len(reply.tokens):
            raise PolicyError(
                f"a reply of {agent!r} has {len(reply.tokens)} tokens and finish_reason {reply.finish_reason!r}, expected a "
                "whole one of at least one token; look at what the engine gives up, and ask it again there"
            )
        return reply

    async def _answer(self, message: Message) -> TextOutcome | None:
        """What the environment says to a reply; None where it took too long."""
        try:
            return await _within(self._limits.step_timeout_s, self._env.step(message))
        except _TookTooLong:
            return None

    def _record(self, agent: str, reply: Completion, reward: float) -> None:
        self._num_tokens += len(reply.tokens)
        self._newest[agent] = len(self._steps)
        self._steps.append(step_of(reply, agent, reward + self._owed.pop(agent, 0.0)))

    def _credit(self, credits: Mapping[str, float]) -> None:
        """What agents earn for what they did before belongs to their newest turn; before their first one, to that."""
        for agent, earned in credits.items():
            if agent not in self._newest:
                self._owed[agent] = self._owed.get(agent, 0.0) + earned
                continue
            step = self._steps[self._newest[agent]]
            self._steps[self._newest[agent]] = msgspec.structs.replace(step, rewards=step.rewards + np.float32(earned))

    def _ended(self, reason: StopReason) -> Trajectory:
        last = self._steps[-1]
        seen = np.concatenate([last.observation["prompt_tokens"], last.chunk.tokens])
        return Trajectory(
            episode=self._env.episode,
            steps=tuple(self._steps),
            final_observation={"prompt_tokens": seen},
            stop_reason=reason,
            info={
                **({} if reason.is_of_environment else {"is_success": False}),
                **self._info,
                "last_reply": self._last_reply,
                "num_turns": len(self._steps),
                "num_tokens": self._num_tokens,
            },
        )

    def _policy_of(self, agent: str) -> LanguagePolicy:
        if not isinstance(self._policy, Mapping):
            return self._policy
        if agent not in self._policy:
            raise ConfigError(
                f"it is the turn of agent {agent!r}, and there are policies for {sorted(self._policy)}; expected one for "
                "each agent that the environment names"
            )
        return self._policy[agent]


class _TookTooLong(Exception):
    """A stage's own deadline passed; a TimeoutError of what it called is something else."""


async def _within(seconds: float | None, work: Awaitable[T]) -> T:
    """The result of `work`, cancelled after `seconds`."""
    deadline = asyncio.timeout(seconds)
    try:
        async with deadline:
            return await work
    except TimeoutError as error:
        if deadline.expired():
            raise _TookTooLong from error
        raise
