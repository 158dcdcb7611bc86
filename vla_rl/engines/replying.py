"""`generate` of every chat engine here: only how tokens are sampled differs between engines.

prompt, tools, options ─► question ─► _sample (torch, or vLLM) ─► completion
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from vla_rl.engines.chat_interface import ChatInterface, Question, Sampled, completion, question
from vla_rl.engines.config import EngineConfig
from vla_rl.engines.device_lane import DeviceLane
from vla_rl.errors import ContextOverflow
from vla_rl.types import ANY_REPLY, Completion, Prompt, ReplyOptions, Sampling, ToolSpec


class ReplyingEngine(ABC):
    """Turns conversations into tokens, has an engine continue them, and turns these into replies.

    Args:
        chat: the policy's tokenizer and chat format.
        lane: runs these conversions, beside the device.
        config: the limit of replies.
        context_size: maximum number of tokens of a prompt and its reply together.
    """

    def __init__(
        self, chat: ChatInterface, lane: DeviceLane, config: EngineConfig, context_size: int
    ) -> None:
        self._chat, self._lane = chat, lane
        self.token_ids: range | None = getattr(chat, "token_ids", None)
        """Ids of the tokens that the policy chooses from; None if it does not name them."""
        self._max_reply, self._context_size = config.max_reply, context_size

    async def generate(
        self,
        prompt: Prompt,
        *,
        tools: Sequence[ToolSpec] = (),
        sampling: Sampling | None = None,
        max_tokens: int | None = None,
        options: ReplyOptions = ANY_REPLY,
    ) -> Completion:
        """Generate one reply. Cancelling the call aborts the reply.

        Args:
            prompt: the conversation so far, or text or tokens to continue.
            tools: tools that the prompt describes to the policy.
            sampling: temperature, or greedy, and the seed of all tokens of this reply.
            max_tokens: maximum number of tokens of the reply; at most `EngineConfig.max_reply`.
            options: form of the reply, stop texts, and what is reported with it.

        Raises: ContextOverflow if the prompt leaves no room for a reply; ValueError for a prompt or
        options that the model cannot take; RuntimeError if the engine is not open; ActorDied if
        engine processes died in all attempts at the request.
        """
        if max_tokens is not None and max_tokens < 1:
            raise ValueError(f"max_tokens is {max_tokens}, expected at least 1 token of a reply.")
        asked = await self._lane.prepare(question, self._chat, prompt, tuple(tools), options)
        room = self._context_size - len(asked.tokens)
        if room < 1:
            raise ContextOverflow(len(asked.tokens), self._context_size)
        limit = min(room, max_tokens or self._max_reply, self._max_reply)
        sampled = await self._sample(asked, sampling or Sampling(), limit)
        return await self._lane.prepare(completion, self._chat, asked, sampled)

    @abstractmethod
    async def _sample(self, asked: Question, sampling: Sampling, max_tokens: int) -> Sampled:
        """Sample the tokens of one reply; a cancellation of the call aborts it."""
