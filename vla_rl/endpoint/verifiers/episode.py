"""A verifiers rollout with inverted control.

The rollout calls a model, and an agent steps it turn by turn.

verifiers ──chat completion──► endpoint ──► Relay.generate ──► result of step() or reset()
          ◄──────answer──────                      ◄────────── argument of the next step()
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import msgspec
import numpy as np

from vla_rl.endpoint.verifiers.rollouts import RolloutResult
from vla_rl.errors import EnvError
from vla_rl.types import (
    ANY_REPLY,
    DEFAULT_AGENT,
    Completion,
    EpisodeSpec,
    Message,
    Prompt,
    ReplyOptions,
    Sampling,
    TextOutcome,
    TextStart,
    ToolSpec,
)


class ModelCall(msgspec.Struct, frozen=True):
    """A model call that waits for its answer.

    Example:
        ModelCall((Message(role="user", content="2 + 2?"),), "policy", (), ANY_REPLY, answer)
    """

    messages: tuple[Message, ...]
    role: str
    tools: tuple[ToolSpec, ...]
    options: ReplyOptions
    answer: "asyncio.Future[Message]"


class Relay:
    """A policy that passes its calls on: each call waits in `asked` for an answer, one at a time.

    Args:
        role: name of the agent that calls.
        asked: queue shared with the relays of other roles; None: a queue of its own.
    """

    def __init__(
        self, role: str = DEFAULT_AGENT, asked: "asyncio.Queue[ModelCall] | None" = None
    ) -> None:
        self._role = role
        self.asked: asyncio.Queue[ModelCall] = asyncio.Queue(maxsize=1) if asked is None else asked

    def for_role(self, role: str) -> "Relay":
        """Return a relay for another role of the same rollout."""
        return Relay(role, self.asked)

    async def generate(
        self,
        prompt: Prompt,
        *,
        tools: Sequence[ToolSpec] = (),
        sampling: Sampling | None = None,
        max_tokens: int | None = None,
        options: ReplyOptions = ANY_REPLY,
    ) -> Completion:
        """Wait for the answer, which the future in `asked` gets. Its tokens are unknown here.

        Raises: ValueError for a prompt that is not a conversation.
        """
        if isinstance(prompt, str | np.ndarray):
            raise ValueError(
                "a text environment takes conversations, expected messages; ask for "
                "a chat completion"
            )
        answer: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        # At most one waits: where an environment calls the model twice at once, the second call
        # follows when the first is answered, so that the turns of an episode have an order.
        await self.asked.put(ModelCall(tuple(prompt), self._role, tuple(tools), options, answer))
        # What is trained on is recorded outside, by the agent that samples the reply; this endpoint
        # only carries messages.
        nothing = np.zeros(0, np.int64)
        return Completion(
            message=await answer,
            prompt_tokens=nothing,
            tokens=nothing,
            log_probs=nothing.astype(np.float32),
            weight_versions=nothing,
            finish_reason="stop",
        )


CUT_OFF = RolloutResult(
    reward=0.0, is_truncated=True, stop_condition="environment_error", metrics={}
)
"""The outcome of a rollout in which the environment raised after a reply."""


class VerifiersEpisode:
    """Implements `vla_rl.types.TextEnv`.

    A call that does not continue a known conversation of its role starts another: its agent is
    named `policy-2`, `policy-3` and so on, and uses the same policy unless each name has its own.
    In an environment with several roles the agents have the names of the roles, and each gets the
    reward of its role.

    Args:
        episode: the episode to run.
        relay: the policy that the rollout calls.
        run: starts the rollout.
        success_at: smallest reward that counts as success.
        note_error: called with an error of the environment that comes after a reply; the episode is
            then cut off. None: such an error is raised.
    """

    def __init__(
        self,
        episode: EpisodeSpec,
        relay: Relay,
        run_rollout: Callable[[], Coroutine[Any, Any, RolloutResult]],
        success_at: float,
        note_error: Callable[[EnvError], None] | None = None,
    ) -> None:
        self._episode, self._relay, self._run_rollout, self._success_at = (
            episode,
            relay,
            run_rollout,
            success_at,
        )
        self._note_error = note_error
        self._rollout: asyncio.Task[RolloutResult] | None = None
        self._pending: ModelCall | None = None
        self._agent = DEFAULT_AGENT
        self._conversations: dict[str, list[Message]] = {}
        self._roles: dict[str, str] = {}
        self._tools: dict[str, tuple[ToolSpec, ...]] = {}

    @property
    def episode(self) -> EpisodeSpec:
        """The episode that this lease is for."""
        return self._episode

    async def reset(self) -> TextStart:
        """Start the rollout and wait for its first call.

        Raises: EnvError if it ends without one.
        """
        if self._rollout is not None:
            raise RuntimeError("an episode is reset once; lease the next one.")
        self._rollout = asyncio.get_running_loop().create_task(
            self._run_rollout(), name="verifiers rollout"
        )
        result = await self._next()
        if result is not None:
            raise EnvError(
                f"the verifiers rollout of {self._episode.task} ended without calling "
                "the model once"
            )
        messages, tools = self._accept_call()
        return TextStart(
            messages=messages, tools=tools, agent=self._agent, options=self._pending_options()
        )

    async def step(self, message: Message) -> TextOutcome:
        """Answer the call that waits.

        Raises: EnvError if the environment fails; ActorDied if its process does.
        """
        if self._pending is None:
            raise RuntimeError(
                "no call waits for an answer: begin with reset(), and stop at an outcome that is "
                "terminated."
            )
        self._conversations[self._agent].append(message)
        if (
            not self._pending.answer.done()
        ):  # else the caller is gone, and the next call or the end of the rollout reports why
            self._pending.answer.set_result(message)
        try:
            result = await self._next()
        except EnvError as error:
            if self._note_error is None:
                raise
            self._note_error(error)
            result = CUT_OFF
        if result is None:
            messages, tools = self._accept_call()
            return TextOutcome(
                messages=messages,
                reward=0.0,
                terminated=False,
                truncated=False,
                info={},
                agent=self._agent,
                tools=tools,
                options=self._pending_options(),
            )
        earned = {name: result.rewards.get(role, 0.0) for name, role in self._roles.items()}
        own = earned.pop(self._agent)
        has_roles = any(role in result.rewards for role in self._roles.values())
        return TextOutcome(
            messages=(),
            reward=own if has_roles else result.reward,
            credits=earned if has_roles else {},
            terminated=not result.is_truncated,
            truncated=result.is_truncated,
            info={
                "is_success": result.reward >= self._success_at,
                "stop": result.stop_condition or "finished",
                "metrics": result.metrics,
            },
            agent=self._agent,
        )

    async def cancel_rollout(self) -> None:
        """Cancel the rollout if it still runs, and wait for its end."""
        if self._rollout is not None:
            self._rollout.cancel()
            await asyncio.gather(self._rollout, return_exceptions=True)

    async def _next(self) -> RolloutResult | None:
        """Return the outcome of the rollout, or None if it calls the model again."""
        assert self._rollout is not None
        self._pending = None
        # Whichever comes first: a rollout that ends or fails never calls again.
        asking = asyncio.get_running_loop().create_task(
            self._relay.asked.get(), name="call of a verifiers rollout"
        )
        try:
            await asyncio.wait({asking, self._rollout}, return_when=asyncio.FIRST_COMPLETED)
            if asking.done():
                self._pending = asking.result()
                return None
            return self._rollout.result()
        finally:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

    def _pending_options(self) -> ReplyOptions:
        """Return the rules of the call that waits for an answer."""
        assert self._pending is not None
        return self._pending.options

    def _accept_call(self) -> tuple[tuple[Message, ...], tuple[ToolSpec, ...]]:
        """Find the conversation that the call continues, and return its new messages and tools."""
        assert self._pending is not None
        asked = self._pending.messages
        # The longest one, because a conversation may be the beginning of another.
        best = max(
            (
                name
                for name, conversation in self._conversations.items()
                if self._roles[name] == self._pending.role and _continues(asked, conversation)
            ),
            key=lambda name: len(self._conversations[name]),
            default=None,
        )
        if best is None:
            role = self._pending.role
            num_before = sum(other == role for other in self._roles.values())
            best = role if not num_before else f"{role}-{num_before + 1}"
            self._conversations[best], self._roles[best] = [], role
        conversation = self._conversations[best]
        names = _map_call_ids(asked, conversation)
        new = tuple(
            msgspec.structs.replace(
                message, tool_call_id=names.get(message.tool_call_id or "", message.tool_call_id)
            )
            for message in asked[len(conversation) :]
        )
        conversation += new
        self._agent = best
        changed = self._tools.get(best) != self._pending.tools
        self._tools[best] = self._pending.tools
        return new, self._pending.tools if changed else ()


def _continues(asked: Sequence[Message], conversation: Sequence[Message]) -> bool:
    return len(asked) >= len(conversation) and all(
        _is_same_message(*pair) for pair in zip(asked, conversation, strict=False)
    )


def _is_same_message(left: Message, right: Message) -> bool:
    """Return whether two messages differ only in ids and outer spaces.

    Another program may have changed those.
    """
    return (
        left.role,
        left.content.strip(),
        [(call.name, call.arguments) for call in left.tool_calls],
    ) == (
        right.role,
        right.content.strip(),
        [(call.name, call.arguments) for call in right.tool_calls],
    )


def _map_call_ids(asked: Sequence[Message], conversation: Sequence[Message]) -> dict[str, str]:
    """Return the policy's own ids of its tool calls, by the ids that came back."""
    return {
        theirs.id: ours.id
        for told, said in zip(asked, conversation, strict=False)
        for theirs, ours in zip(told.tool_calls, said.tool_calls, strict=True)
    }
