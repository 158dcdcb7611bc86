"""The policy that one episode gets of an engine, or of a team of engines."""

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any, TypeAlias

import msgspec
import numpy as np

from vla_rl.errors import AgentError, ConversationRejected, PolicyError
from vla_rl.rollout.engines import (
    ActionEngine,
    ChatEngine,
    LaggingEngine,
    require_action_engine,
    require_chat_engine,
)
from vla_rl.types import (
    ANY_REPLY,
    SOLE_MEMBER,
    ActionChunk,
    AgentNames,
    Completion,
    EpisodeSpec,
    Message,
    Observation,
    Prompt,
    ReplyOptions,
    Sampling,
    ToolSpec,
    derive_seed,
    find_impossible_log_prob,
)
from vla_rl.util.stalls import begin_wait, end_wait


def with_unique_call_ids(reply: Message, earlier: Sequence[Message]) -> Message:
    """Return `reply`, with its tool calls renumbered if their ids were used before.

    Args:
        reply: a reply whose own ids differ from each other.
        earlier: the conversation that it answers. The same conversation and reply always give the
            same ids.
    """
    taken = {call.id for message in earlier for call in message.tool_calls}
    if taken.isdisjoint(call.id for call in reply.tool_calls):
        return reply
    num_earlier = sum(len(message.tool_calls) for message in earlier)
    free = (name for number in count(num_earlier) if (name := f"call_{number}") not in taken)
    calls = tuple(msgspec.structs.replace(call, id=next(free)) for call in reply.tool_calls)
    return msgspec.structs.replace(reply, tool_calls=calls)


logger = logging.getLogger(__name__)

LONG_EPISODE = 10_000
"""Decisions in one episode after which a warning suggests that its environment never ends one."""


class EngineTeam:
    """The engines of a team, by member name.

    Args:
        engines: each acts for the agent of its name; the only one of a team of one for every agent.
    """

    def __init__(self, engines: Mapping[str, ActionEngine | ChatEngine]) -> None:
        if not engines:
            raise ValueError("a team has no engine, expected one for each agent of the environment")
        self.engines, self._agent_names = dict(engines), AgentNames(engines)

    @classmethod
    def from_engine(cls, engine: "AnyEngine") -> "EngineTeam":
        """Return a team, or the team of one that an engine is."""
        return engine if isinstance(engine, EngineTeam) else cls({SOLE_MEMBER: engine})

    @property
    def weight_version(self) -> int:
        """Weight version of the engine that is furthest behind."""
        # The furthest behind decides: staleness is promised for every token of an episode.
        return min(engine.weight_version for engine in self.engines.values())

    @property
    def pending_version(self) -> int:
        """The `weight_version` after the arrival of the weights that are on their way."""
        return min(
            engine.pending_version if isinstance(engine, LaggingEngine) else engine.weight_version
            for engine in self.engines.values()
        )

    def on_weights_applied(self, call: Callable[[], None]) -> None:
        """Call `call` each time that an engine serves weights that it was behind with."""
        for engine in self.engines.values():
            if isinstance(engine, LaggingEngine):
                engine.on_weights_applied(call)

    def get_token_ids(self, agent: str) -> "range | None":
        """Return the ids of the tokens that an agent's policy chooses from, if its engine has them.

        Raises: KeyError if no policy acts for the agent.
        """
        return getattr(self.engines[self._agent_names.get_member(agent)], "token_ids", None)

    async def wait_applied(self) -> None:
        """Wait until no weights are on their way."""
        for engine in self.engines.values():
            if isinstance(engine, LaggingEngine):
                await engine.wait_applied()

    def make_policies(
        self, episode: EpisodeSpec, counter: "DecisionCounter | None" = None
    ) -> "EpisodePolicy | dict[str, EpisodePolicy]":
        """Return the policy or policies that the agent of an episode gets.

        It is one for all agents, or one by agent name, each with seeds of its own.
        """
        policies = {
            name: EpisodePolicy(
                engine,
                msgspec.structs.replace(
                    episode, policy_seed=self._agent_names.derive_seed(episode.policy_seed, name)
                ),
                counter,
            )
            for name, engine in self.engines.items()
        }
        return policies[SOLE_MEMBER] if self._agent_names.acts_for_all else policies


AnyEngine: TypeAlias = ActionEngine | ChatEngine | EngineTeam
"""An engine, or the engines of a team. Schedulers accept both."""


class DecisionCounts(msgspec.Struct, frozen=True):
    """Decisions of a policy, up to one moment.

    Example:
        DecisionCounts(num_waiting=5, num_decisions=1280, asked_s=41.5)
    """

    num_waiting: int
    """Decisions that wait for the policy."""

    num_decisions: int
    """Decisions that were made."""

    asked_s: float
    """Seconds with at least one decision being asked."""


class DecisionCounter:
    """Counts the decisions that wait for the policy, and the time with at least one of them."""

    def __init__(self) -> None:
        self.num_waiting = 0
        self.num_decisions = 0
        self._asked_s = 0.0
        self._asked_since = 0.0
        self._has_warned = self._has_warned_of_rejection = False

    def warn_long_episode(self, episode: EpisodeSpec) -> None:
        """Warn, once, that an episode may never end."""
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "episode %d (%s) has made %d decisions and has not ended; its environment (%s) "
                "sets terminated or truncated at an end. max_episode_steps of gymnasium.register, "
                "or scheduler.episode_timeout_s, cuts episodes off",
                episode.episode_id,
                episode.task,
                LONG_EPISODE,
                episode.env.id,
            )

    def warn_rejection(self, episode: EpisodeSpec, error: ConversationRejected) -> None:
        """Warn, once, that the policy's chat template rejects what the policy wrote."""
        if error.is_reply_at_fault and not self._has_warned_of_rejection:
            self._has_warned_of_rejection = True
            logger.warning(
                "episode %d (%s) ends, because of the policy's own reply: %s. Later episodes that "
                "end so are counted in rollout/stopped/reply_rejected; where the template allows one "
                "tool call in a message, ToolRule(max_calls=1) in the reply's options prevents it",
                episode.episode_id,
                episode.task,
                error,
            )

    def begin_decision(self, now: float) -> None:
        """Count a decision that is being asked."""
        if self.num_waiting == 0:
            self._asked_since = now
        self.num_waiting += 1

    def end_decision(self, now: float) -> None:
        """Count a decision as answered, or its episode as ended without the answer."""
        self.num_waiting -= 1
        self.num_decisions += 1
        if self.num_waiting == 0:
            self._asked_s += now - self._asked_since

    def asked_s(self, now: float) -> float:
        """Return the seconds with at least one decision being asked, up to `now`."""
        return self._asked_s + (now - self._asked_since if self.num_waiting else 0.0)

    def counts(self, now: float) -> DecisionCounts:
        """Return all counts up to `now`."""
        return DecisionCounts(self.num_waiting, self.num_decisions, self.asked_s(now))


class EpisodePolicy:
    """The policy of one episode, which gives every decision a seed of its own.

    The seed of decision k does not depend on timing.

    Args:
        engine: answers the decisions.
        episode: its `sampling` and `policy_seed` are used; decision k has the seed
            `derive_seed(policy_seed, k)`, so a repeated episode makes the same decisions from the
            same observations.
        counter: counts the decisions, shared by all episodes of a scheduler.
    """

    def __init__(
        self,
        engine: ActionEngine | ChatEngine,
        episode: EpisodeSpec,
        counter: DecisionCounter | None = None,
    ) -> None:
        self._engine, self._episode = engine, episode
        self._counter = counter if counter is not None else DecisionCounter()
        self._clock = asyncio.get_running_loop().time
        self._num_decisions = 0

    async def act(self, observation: Observation, sampling: Sampling | None = None) -> ActionChunk:
        """Choose an action chunk.

        Without `sampling`, the episode's own is used. The seed is always this decision's.

        Raises: PolicyError for a log-prob that is NaN, infinite or above 0; AgentError if
        `observation` is the tuple that `reset` returned; TypeError if the engine generates text.
        """
        # The most frequent mistake in an agent of one's own; without this, the tuple fails deep
        # inside the policy's image processing.
        seen: Any = observation
        if isinstance(seen, tuple) and len(seen) == 2 and isinstance(seen[1], dict):
            raise AgentError(
                "policy.act was given what env.reset returned, a tuple (observation, info); "
                "expected the observation alone: "
                "`observation, info = await env.reset()`"
            )
        engine = require_action_engine(self._engine)
        number = self._num_decisions
        with self._deciding(sampling) as chosen:
            chunk = await engine.act(observation, chosen)
        self._require_possible(number, chunk.log_probs, chunk.tokens, chunk.weight_version)
        return msgspec.structs.replace(chunk, temperature=chosen.temperature)

    async def generate(
        self,
        prompt: Prompt,
        *,
        tools: Sequence[ToolSpec] = (),
        sampling: Sampling | None = None,
        max_tokens: int | None = None,
        options: ReplyOptions = ANY_REPLY,
    ) -> Completion:
        """Generate one reply.

        Without `sampling`, the episode's own is used. The seed is always this decision's.

        Its tool calls get ids that differ from all earlier ones of the conversation, even if the
        chat format repeats them.

        Raises: PolicyError for a log-prob that is NaN, infinite or above 0; TypeError if the engine
        chooses action chunks; ValueError for `Sampling.by_mean`.
        """
        engine = require_chat_engine(self._engine)
        number = self._num_decisions
        with self._deciding(sampling) as chosen:
            chosen.require_no_mean()
            try:
                reply = await engine.generate(
                    prompt, tools=tools, sampling=chosen, max_tokens=max_tokens, options=options
                )
            except ConversationRejected as error:
                self._counter.warn_rejection(self._episode, error)
                raise
        self._require_possible(number, reply.log_probs, reply.tokens, engine.weight_version)
        # Chat formats count calls from 0 in each reply; a tool result that names its call by id
        # would belong to several.
        earlier = () if isinstance(prompt, str | np.ndarray) else prompt
        message = with_unique_call_ids(reply.message, earlier)
        temperature = chosen.temperature if reply.temperature is None else reply.temperature
        return msgspec.structs.replace(reply, message=message, temperature=temperature)

    def _require_possible(
        self, number: int, log_probs: np.ndarray, tokens: np.ndarray, version: int
    ) -> None:
        index = find_impossible_log_prob(log_probs, tokens)
        if index is not None:
            episode = self._episode
            raise PolicyError(
                f"the policy's log-prob of token {index} of decision {number} of episode "
                f"{episode.episode_id} ({episode.task!r}) is {log_probs[index]}, with the weights "
                f"after {version} updates; expected finite log-probs of at most 0. Look for NaN or "
                "infinity in its weights and inputs, and whether it reports natural logs."
            )

    @contextmanager
    def _deciding(self, sampling: Sampling | None) -> Iterator[Sampling]:
        """Count a decision while it is made, and yield its sampling."""
        # From the number of the decision and not from a generator: a repeated episode, on any
        # engine, makes the same choices in whatever order the batches ran.
        seed = derive_seed(self._episode.policy_seed, self._num_decisions)
        chosen = msgspec.structs.replace(
            self._episode.sampling if sampling is None else sampling, seed=seed
        )
        self._num_decisions += 1
        if self._num_decisions == LONG_EPISODE:
            self._counter.warn_long_episode(self._episode)
        self._counter.begin_decision(self._clock())
        wait = begin_wait(f"episode {self._episode.episode_id}", on="the policy")
        try:
            yield chosen
        finally:
            end_wait(wait)
            self._counter.end_decision(self._clock())
