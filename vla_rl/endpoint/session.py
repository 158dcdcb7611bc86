"""A session: the replies under one key, and the trajectory made of them."""

import asyncio
import secrets
from collections.abc import Coroutine, Sequence
from typing import Any, Final

import msgspec
import numpy as np

from vla_rl.endpoint.api import Asked
from vla_rl.endpoint.http import RequestError
from vla_rl.errors import ContextOverflow, ConversationRejected
from vla_rl.rollout.chat_agent import make_reply_step
from vla_rl.types import (
    AgentNames,
    Completion,
    EpisodeSpec,
    Info,
    LanguagePolicies,
    LanguagePolicy,
    Message,
    StopReason,
    Trajectory,
    key_by_member,
)


def new_key() -> str:
    """Return a random key that is too long to guess."""
    return f"vla-{secrets.token_urlsafe(24)}"


MOST_REMEMBERED: Final = 1000
"""Conversations that a session without a record keeps for requests that continue one."""


class RecordedCall(msgspec.Struct, frozen=True, kw_only=True):
    """One answer of the policy as sampled: token ids, log-probs and weight versions.

    Example:
        RecordedCall(agent="policy", completion=Completion(message=..., tokens=np.array([1337, 2]), ...))
    """

    agent: str
    completion: Completion


class Session:
    """One episode at the endpoint: a key, a policy, and a record. Made by `Endpoint.session`.

    Args:
        policy: one policy, or one for each agent by name: requests then choose by their `model`.
        base_url: URL of the endpoint.
        api_key: key that clients show.
    """

    def __init__(self, policy: LanguagePolicies, base_url: str, api_key: str) -> None:
        self.base_url, self.api_key = base_url, api_key
        self.calls: list[RecordedCall] = []
        """Recorded calls, in the order of their answers."""
        self.overflow: ContextOverflow | None = None
        """Error of the last prompt that left no room for a reply."""
        self.rejection: ConversationRejected | None = None
        """Error of the last prompt that the chat template rejected because of the policy's own
        replies."""
        self.failure: Exception | None = None
        """The policy's own exception, if it failed for another reason; the client only got status
        500."""
        self._policies = key_by_member(policy)
        self._agent_names = AgentNames(self._policies)
        self._conversations: dict[str, tuple[Message, ...]] = {}
        self._running: set[asyncio.Task[Any]] = set()

    @property
    def models(self) -> tuple[str, ...] | None:
        """Names of models that requests may use; None: any name."""
        return None if self._agent_names.acts_for_all else self._agent_names.names

    def find_policy(self, model: str) -> tuple[str, LanguagePolicy]:
        """Return the agent of a request and its policy.

        Raises: KeyError for a name that no agent has.
        """
        agent = self._agent_names.get_member(model)
        return agent, self._policies[agent]

    def recall(self, answer_id: str) -> Sequence[Message] | None:
        """Return the conversation up to a stored answer; None if there is none."""
        return self._conversations.get(answer_id)

    def store_conversation(self, answer_id: str, conversation: Sequence[Message]) -> None:
        """Store a conversation for requests that continue from its last answer."""
        self._conversations[answer_id] = tuple(conversation)

    def record_call(self, agent: str, completion: Completion) -> None:
        """Record one answer."""
        self.calls.append(RecordedCall(agent=agent, completion=completion))

    def register_request(self, task: "asyncio.Task[Any]") -> None:
        """Register a request that is being answered; the end of the session cancels it."""
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def wait_answered(self, timeout_s: float) -> None:
        """Wait until the requests that are being answered now have their answers, or time is up."""
        if self._running:
            await asyncio.wait(set(self._running), timeout=timeout_s)

    def cancel_requests(self) -> None:
        """Cancel the requests that are still being answered. The record stays."""
        for task in self._running:
            task.cancel()

    def trajectory(
        self, episode: EpisodeSpec, reward: float, reason: StopReason, info: Info | None = None
    ) -> Trajectory:
        """Return all calls as one trajectory, a step each; the last step has `reward`.

        Calls are ordered by thread: one continues another if its prompt begins with exactly the
        tokens of that call, prompt and reply; only such turns are trained as one conversation.
        `info` holds the numbers of calls and threads.

        Raises: ValueError if there was no call.
        """
        if not self.calls:
            raise ValueError(
                "no call was made with this session's key; give the agent its base_url and api_key"
            )
        # Agents keep histories of their own: they trim, rewrite and branch them. Only equal tokens
        # show which call continues which one, and only then are the log-probs of both those of one
        # conversation.
        found = find_threads(self.calls)
        ordered = [self.calls[number] for thread in found for number in thread]
        steps = tuple(
            make_reply_step(call.completion, call.agent, reward if call is ordered[-1] else 0.0)
            for call in ordered
        )
        last = ordered[-1].completion
        return Trajectory(
            episode=episode,
            steps=steps,
            final_observation={"prompt_tokens": np.concatenate([last.prompt_tokens, last.tokens])},
            stop_reason=reason,
            info={
                "is_success": reason.is_success,
                **(info or {}),
                "num_turns": len(steps),
                "num_threads": len(found),
                "num_tokens": sum(len(step.chunk.tokens) for step in steps),
            },
        )


class UnrecordedSession(Session):
    """A session that makes no trajectory: of a server that answers for as long as it runs."""

    def record_call(self, agent: str, completion: Completion) -> None:
        """Do nothing."""

    def store_conversation(self, answer_id: str, conversation: Sequence[Message]) -> None:
        """Store a conversation, and forget the oldest beyond the latest 1,000."""
        super().store_conversation(answer_id, conversation)
        if len(self._conversations) > MOST_REMEMBERED:
            del self._conversations[next(iter(self._conversations))]


def find_threads(calls: Sequence[RecordedCall]) -> list[list[int]]:
    """Return lists of the numbers of calls that continue one another.

    They do by exact token prefix; lists are in order of their first calls.

    A call continues the longest call of its agent that its prompt begins with and that no other
    call continues yet; a prompt that renders the past in any other way starts a new thread.
    """
    threads: list[list[int]] = []
    thread_tokens: list[np.ndarray] = []
    """All tokens of each thread so far."""
    for number, call in enumerate(calls):
        prompt = call.completion.prompt_tokens
        best, best_length = None, 0
        for index, known_tokens in enumerate(thread_tokens):
            length = len(known_tokens)
            # its last token first: an agent that asks a thousand times may have as many threads
            if best_length < length <= len(prompt) and prompt[length - 1] == known_tokens[-1]:
                is_of_agent = calls[threads[index][-1]].agent == call.agent
                if is_of_agent and np.array_equal(prompt[:length], known_tokens):
                    best, best_length = index, length
        # Also for a prompt that was asked before, as by a retry: both replies were sampled after
        # it, and neither continues the other.
        if best is None:
            best = len(threads)
            threads.append([])
            thread_tokens.append(prompt)
        threads[best].append(number)
        thread_tokens[best] = np.concatenate([prompt, call.completion.tokens])
    return threads


async def generate_replies(
    asked: Asked, policy: LanguagePolicy, session: Session
) -> tuple[Completion, ...]:
    """Return `num_choices` replies to each prompt, in order.

    All are sampled together, each with a seed of its own.

    Raises: RequestError, which tells the client what to do; a failure of the policy is also stored
    in the session.
    """
    one_each = [
        policy.generate(
            prompt, tools=asked.tools, max_tokens=asked.max_tokens, options=asked.options
        )
        for prompt in asked.prompts
        for _ in range(asked.num_choices)
    ]
    try:
        replies = await _together(one_each)
    except ContextOverflow as error:
        session.overflow = error
        raise RequestError(str(error), code="context_length_exceeded") from error
    except ConversationRejected as error:
        # Where the agent's own words are at fault, it may correct them and ask again; only the
        # policy's end its episode.
        if error.is_reply_at_fault:
            session.rejection = error
        raise RequestError(str(error), code="conversation_rejected") from error
    except (
        ValueError,
        RecursionError,
    ) as error:  # a prompt or options that the model does not accept
        raise RequestError(str(error)) from error
    except Exception as error:  # the episode raises it; the client cannot know what to do about it
        session.failure = error
        raise RequestError(f"the policy failed: {type(error).__name__}", status=500) from error
    # An update of the weights may abort a reply, which is then no answer. Clients' libraries ask
    # again after a 503 by themselves.
    if any(reply.finish_reason == "aborted" for reply in replies):
        raise RequestError("the generation was aborted; ask again.", status=503)
    return replies


async def _together(calls: list[Coroutine[Any, Any, Completion]]) -> tuple[Completion, ...]:
    """Return all results in order.

    The first error cancels the other calls and is raised unchanged.
    """
    if len(calls) == 1:
        return (await calls[0],)
    try:
        # The answer holds all replies or none: once one has failed, the others would be sampled for
        # nobody.
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(call, name="one of several replies") for call in calls]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from errors
    return tuple(task.result() for task in tasks)
