"""Conversion from messages to tokens and back, the same for every chat engine.

    prompt, tools, options ─► make_question ─► tokens, grammar, stop texts
        ─► _sample (torch, vLLM, or a server) ─► make_completion ─► Completion

Engines differ only in how they sample tokens, so a reply means the same whichever engine generated it.
The conversions run on the CPU, in any thread.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

import msgspec
import numpy as np

from vla_rl.engines.config import EngineConfig
from vla_rl.engines.device_lane import DeviceLane
from vla_rl.engines.sampling import Vocabulary
from vla_rl.errors import ContextOverflow, ConversationRejected
from vla_rl.rollout.policies import with_unique_call_ids
from vla_rl.types import (
    ANY_REPLY,
    Completion,
    FinishReason,
    Message,
    Prompt,
    ReplyOptions,
    Sampling,
    TokenReport,
    ToolRule,
    ToolSpec,
)


class ChatInterface(Protocol):
    """The text side of a language model."""

    @property
    def stop_tokens(self) -> frozenset[int]:
        """Tokens that end a reply."""
        ...

    @property
    def vocabulary(self) -> Vocabulary:
        """The tokenizer's tokens as bytes."""
        ...

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> np.ndarray:
        """Apply the chat template to a conversation, up to the start of the reply: int64 [P]."""
        ...

    def tokenize(self, text: str) -> np.ndarray:
        """Tokenize plain text: int64 [P].

        Names of special tokens in the text become these tokens.
        """
        ...

    def grammar(self, options: ReplyOptions, tools: Sequence[ToolSpec]) -> str | None:
        """Return the grammar of the replies that satisfy the options.

        It is in llguidance's dialect of Lark; None allows every reply.

        Raises: ValueError for options that contradict each other or name an unknown tool.
        """
        ...

    def decode(self, tokens: np.ndarray) -> str:
        """Decode the tokens of a reply, int64 [T], without the token that ends it."""
        ...

    def parse(self, text: str, *, with_tools: bool = True) -> Message:
        """Parse the text of a reply into a message.

        With tools, calls that cannot be parsed become `Message.call_errors`; the others have ids
        that are unique in the reply.
        """
        ...


class ImagePrompt(Protocol):
    """A prompt with images, in the form that its model reads."""

    @property
    def compared(self) -> np.ndarray:
        """The prompt's tokens, int64 [P], with negative numbers for those of images: equal only if
        the images are."""
        ...

    @property
    def image_starts(self) -> np.ndarray:
        """Place of each image's first token, int64 [n]."""
        ...


@runtime_checkable
class ImageChatInterface(Protocol):
    """The part of a chat interface that only models with a vision tower have."""

    def prepare_prompt(self, tokens: np.ndarray, images: Sequence[np.ndarray]) -> ImagePrompt:
        """Prepare a rendered conversation and its images for the model.

        Raises: ValueError if the tokens are not those of a conversation with these images.
        """
        ...


@dataclass(frozen=True)
class Sampled:
    """The tokens that an engine sampled for one question.

    Attributes:
        tokens: int64 [T].
        log_probs: float32 [T].
        versions: int64 [T].
        finish_reason: why the reply ended.
        stopped_by: the stop text that ended it, if one did.
        alternatives: ids and log-probs of the likeliest tokens at each place, if the question asked
            for them.

    Example:
        Sampled(tokens=np.array([1337, 2]), log_probs=np.array([-0.31, -0.02], np.float32),
                versions=np.array([7, 7]), finish_reason="stop")
    """

    tokens: np.ndarray
    log_probs: np.ndarray
    versions: np.ndarray
    finish_reason: FinishReason
    stopped_by: str | None = None
    alternatives: Sequence[Sequence[tuple[int, float]]] = ()


@dataclass(frozen=True)
class Question:
    """A prompt and the rules of its reply, in the form that engines take.

    Attributes:
        tokens: int64 [P].
        messages: the conversation; none if the prompt was text or tokens.
        grammar: restricts the reply, if there is one.
        options: options of the reply.
        images: images of the conversation, in their order.
        image_prompt: prompt and images as the model reads them; None without images.

    Example:
        Question(tokens=np.array([1, 318, 42]), messages=(Message(role="user", content="2 + 2?"),),
                 grammar=None, options=ReplyOptions(stop=("Observation:",)))
    """

    tokens: np.ndarray
    messages: tuple[Message, ...]
    grammar: str | None
    options: ReplyOptions
    images: tuple[np.ndarray, ...] = ()
    image_prompt: ImagePrompt | None = None


def make_question(
    chat: ChatInterface, prompt: Prompt, tools: Sequence[ToolSpec], options: ReplyOptions
) -> Question:
    """Convert a prompt and its options to the form that an engine samples from.

    Raises: ValueError for a prompt or options that the model cannot take; ConversationRejected, also
    a ValueError, for a conversation that its chat template or its vocabulary cannot take.
    """
    if "" in options.stop:
        raise ValueError("a stop text is empty, expected at least one character each")
    is_conversation = not isinstance(prompt, str | np.ndarray)
    if not is_conversation or (options.format is not None and not tools):
        # a reply to this is never parsed for tool calls, even if it looks like one
        options = msgspec.structs.replace(options, tools=ToolRule(mode="none"))
    if isinstance(prompt, str):
        tokens = chat.tokenize(prompt)
    elif isinstance(prompt, np.ndarray):
        tokens = prompt
    else:
        tokens = chat.render(prompt, tools)
    if tokens.ndim != 1 or not len(tokens) or tokens.dtype.kind != "i":
        raise ValueError(
            f"the prompt is {tokens.dtype} {list(tokens.shape)}, expected int64 [P] with at least "
            "one token"
        )
    # An index beyond the embedding is a failed assertion of the GPU, after which no call of this
    # process works any more.
    if tokens.min() < 0 or tokens.max() >= chat.vocabulary.num_logits:
        words = (
            f"the prompt has tokens from {tokens.min()} to {tokens.max()}, expected 0 to "
            f"{chat.vocabulary.num_logits - 1}"
        )
        if isinstance(prompt, str | np.ndarray):
            raise ValueError(words)
        # the tokenizer has more tokens than the network, and a text spells the name of one
        raise ConversationRejected(
            words, is_reply_at_fault=any(message.role == "assistant" for message in prompt)
        )
    grammar = chat.grammar(options, tools)
    if grammar is not None:
        # rejects a grammar that cannot be compiled before sampling starts
        chat.vocabulary.guide(grammar)
    messages = tuple(prompt) if is_conversation else ()
    images, image_prompt = process_images(chat, tokens, messages)
    return Question(tokens, messages, grammar, options, images, image_prompt)


def process_images(
    chat: ChatInterface, tokens: np.ndarray, messages: Sequence[Message]
) -> tuple[tuple[np.ndarray, ...], ImagePrompt | None]:
    """Return the images of a rendered conversation, and prepare it for the model if there are any.

    Raises: ValueError if the model reads text alone.
    """
    images = tuple(image for message in messages for image in message.images)
    if not images:
        return (), None
    if not isinstance(chat, ImageChatInterface):
        raise ValueError(
            f"the conversation has {len(images)} images, but {type(chat).__name__} reads text alone; "
            "take a policy with a vision tower, such as Qwen3-VL"
        )
    return images, chat.prepare_prompt(tokens, images)


def make_completion(chat: ChatInterface, asked: Question, sampled: Sampled) -> Completion:
    """Convert sampled tokens to the answer to a question."""
    text = chat.decode(sampled.tokens)
    if sampled.stopped_by is not None:
        # The text ends before the stop text, as with OpenAI. The tokens stay as they were sampled,
        # because the learner computes the log-probs of all of them.
        text = text.partition(sampled.stopped_by)[0]
    if asked.messages:
        said = chat.parse(text, with_tools=asked.options.tools.mode != "none")
        said = with_unique_call_ids(said, asked.messages)
    else:
        said = Message(role="assistant", content=text)
    return Completion(
        message=said,
        prompt_tokens=asked.tokens,
        tokens=sampled.tokens,
        log_probs=sampled.log_probs,
        weight_versions=sampled.versions,
        finish_reason=sampled.finish_reason,
        grammar=asked.grammar,
        stopped_by=sampled.stopped_by,
        images=asked.images,
        image_starts=()
        if asked.image_prompt is None
        else tuple(asked.image_prompt.image_starts.tolist()),
        report=None if asked.options.top_log_probs is None else _report(chat.vocabulary, sampled),
    )


def _report(vocabulary: Vocabulary, sampled: Sampled) -> tuple[TokenReport, ...]:
    rows = sampled.alternatives or [()] * len(sampled.tokens)
    return tuple(
        TokenReport(
            text=vocabulary.text([token]),
            alternatives=tuple((vocabulary.text([other]), log_prob) for other, log_prob in row),
        )
        for token, row in zip(sampled.tokens.tolist(), rows, strict=True)
    )


class ChatEngineBase(ABC):
    """Turns conversations into tokens, has an engine continue them, and turns these into replies.

    Args:
        chat: the policy's tokenizer and chat format.
        lane: runs these conversions, beside the device.
        config: the limit of replies.
        context_size: maximum number of tokens of a prompt and its reply together.
    """

    greedy_temperature: ClassVar[float | None] = None
    """Temperature of the log-probs of greedy replies; None: that of the request."""

    def __init__(
        self, chat: ChatInterface, lane: DeviceLane, config: EngineConfig, context_size: int
    ) -> None:
        self._chat, self._lane = chat, lane
        self.token_ids: range | None = getattr(chat, "token_ids", None)
        """Ids of the tokens that the policy chooses from; None if it does not name them."""
        self._max_reply, self._context_size = config.max_reply, context_size
        self._max_images = config.max_images

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
        asked = await self._lane.prepare(make_question, self._chat, prompt, tuple(tools), options)
        if len(asked.images) > self._max_images:
            raise ValueError(
                f"the conversation shows {len(asked.images)} images, expected at most "
                f"engine.max_images = {self._max_images}; show fewer, or raise it"
            )
        room = self._context_size - len(asked.tokens)
        if room < 1:
            raise ContextOverflow(len(asked.tokens), self._context_size)
        limit = min(room, max_tokens or self._max_reply, self._max_reply)
        chosen = sampling or Sampling()
        sampled = await self._sample(asked, chosen, limit)
        completion = await self._lane.prepare(make_completion, self._chat, asked, sampled)
        if chosen.greedy and self.greedy_temperature is not None:
            return msgspec.structs.replace(completion, temperature=self.greedy_temperature)
        return completion

    @abstractmethod
    async def _sample(self, asked: Question, sampling: Sampling, max_tokens: int) -> Sampled:
        """Sample the tokens of one reply; a cancellation of the call aborts it."""
