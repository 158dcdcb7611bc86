"""Engines as episodes see them: one protocol for action chunks, one for replies.

    ActionEngine    act        observation ─► ActionChunk
    ChatEngine      generate   conversation ─► Completion

`vla_rl.engines` implements both, with torch in this process and with processes of vLLM. An engine
of your own is any object with the members of one of them.
"""

from collections.abc import Callable, Sequence
from typing import Protocol, cast, runtime_checkable

from vla_rl.types import (
    ANY_REPLY,
    ActionChunk,
    Completion,
    Observation,
    Prompt,
    ReplyOptions,
    Sampling,
    ToolSpec,
)


class ActionEngine(Protocol):
    """Answers the observations of any number of episodes, and batches the requests that wait.

    If it has an attribute `token_ids`, a range, the tokens that agents hand over have to be in it;
    the same holds for a `ChatEngine`.
    """

    @property
    def weight_version(self) -> int:
        """Number of updates applied to the weights that act from now on."""
        ...

    async def act(self, observation: Observation, sampling: Sampling) -> ActionChunk:
        """Choose an action chunk.

        The same observation, sampling (seed included) and weights give the same chunk.
        """
        ...


@runtime_checkable
class EngineBehind(Protocol):
    """An engine that may have older weights than the learner has published, for a while."""

    def go_ahead(self) -> None:
        """Let the learner go on before the engine has its new weights."""
        ...

    @property
    def coming_version(self) -> int:
        """The `weight_version` after the arrival of the weights that are on their way."""
        ...

    def when_served(self, call: Callable[[], None]) -> None:
        """Call `call` in this loop each time that `weight_version` has changed."""
        ...

    async def arrive(self) -> None:
        """Wait until nothing is on its way."""
        ...


class ChatEngine(Protocol):
    """Answers the conversations of any number of episodes, and batches the requests that wait."""

    @property
    def weight_version(self) -> int:
        """Number of updates applied to the weights that reply from now on."""
        ...

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

        The same prompt, sampling (seed included), options and weights give the same one.
        """
        ...


def require_action_engine(engine: ActionEngine | ChatEngine) -> ActionEngine:
    """Return the engine. Raises: TypeError if it generates text."""
    # an attribute, not isinstance: a check of a protocol costs several µs at every decision
    if not hasattr(engine, "act"):
        raise TypeError(
            "this engine's policy generates text and has no `act`; use `generate`, as chat_agent "
            "does"
        )
    return cast(ActionEngine, engine)


def require_chat_engine(engine: ActionEngine | ChatEngine) -> ChatEngine:
    """Return the engine. Raises: TypeError if it chooses action chunks."""
    if not hasattr(engine, "generate"):
        raise TypeError(
            "this engine's policy chooses action chunks and does not generate text; use `act`"
        )
    return cast(ChatEngine, engine)
