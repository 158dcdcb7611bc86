"""A small real language policy whose tokens are bytes: it says what it is told to say, in turn."""

import asyncio
from collections.abc import Sequence

import numpy as np

from vla_rl.errors import ContextOverflow
from vla_rl.types import (
    ANY_REPLY,
    Completion,
    EnvSpec,
    EpisodeSpec,
    Message,
    Prompt,
    ReplyOptions,
    Sampling,
    TextOutcome,
    TextStart,
    TokenReport,
    ToolSpec,
)

END = b"\n"
TEMPLATE = "<{role}>{content}{calls}"


class BytePolicy:
    """Prompts are `<role>text` for each message, each ended by a newline; replies are `says`, one
    after the other.

    Args:
        says: messages, or texts.
        context_size: most bytes of a prompt.
        version: of its weights; counts up by one for each token.
    """

    def __init__(self, *says: str | Message, context_size: int = 1 << 16, version: int = 7) -> None:
        self._says = [
            Message(role="assistant", content=said) if isinstance(said, str) else said
            for said in says
        ]
        self._context_size, self._version = context_size, version
        self.requests: list[tuple[tuple[Message, ...], tuple[ToolSpec, ...], int | None]] = []
        self.options: list[ReplyOptions] = []
        self.is_stuck = False
        self.fails_with: Exception | None = None
        self.asked = asyncio.Event()
        self.given_up = asyncio.Event()

    async def generate(
        self,
        prompt: Prompt,
        *,
        tools: Sequence[ToolSpec] = (),
        sampling: Sampling | None = None,
        max_tokens: int | None = None,
        options: ReplyOptions = ANY_REPLY,
    ) -> Completion:
        self.requests.append(
            (tuple(prompt) if isinstance(prompt, list | tuple) else (), tuple(tools), max_tokens)
        )
        self.options.append(options)
        self.asked.set()
        read = self.prompt_of(prompt)
        if len(read) > self._context_size:
            raise ContextOverflow(len(read), self._context_size)
        if self.fails_with is not None:
            raise self.fails_with
        if self.is_stuck:
            try:
                await asyncio.Event().wait()
            finally:
                self.given_up.set()
        message = self._says.pop(0)
        tokens = as_tokens(
            message.content + "".join(call.name for call in message.tool_calls) + END.decode()
        )
        if max_tokens is not None:
            tokens = tokens[:max_tokens]
        return Completion(
            message=message,
            prompt_tokens=read,
            tokens=tokens,
            log_probs=np.full(len(tokens), -0.5, np.float32),
            weight_versions=self._version + np.arange(len(tokens)),
            finish_reason="length" if len(tokens) == max_tokens else "stop",
            temperature=0.5,
            report=None
            if options.top_log_probs is None
            else report_of(tokens, options.top_log_probs),
        )

    @staticmethod
    def prompt_of(prompt: Prompt) -> np.ndarray:
        if isinstance(prompt, np.ndarray):
            return prompt
        if isinstance(prompt, str):
            return as_tokens(prompt)
        text = "".join(
            f"<{message.role}>{message.content}{''.join(call.name for call in message.tool_calls)}\n"
            for message in prompt
        )
        return as_tokens(text + "<assistant>")


def as_tokens(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), np.uint8).astype(np.int64)


def report_of(tokens: np.ndarray, num_alternatives: int) -> tuple[TokenReport, ...]:
    """Every token, and as many question marks in its place as were asked for."""
    others = tuple((b"?", -1.0 - number) for number in range(num_alternatives))
    return tuple(TokenReport(text=bytes([token]), alternatives=others) for token in tokens.tolist())


EPISODE = EpisodeSpec(
    episode_id=3, group_id=0, member=0, env=EnvSpec(id="asks"), task="asks", seed=0, policy_seed=0
)


class AskOnce:
    """A text environment that asks `6x7?` and takes `42` for an answer."""

    def __init__(self) -> None:
        self.answers: list[str] = []

    @property
    def episode(self) -> EpisodeSpec:
        return EPISODE

    async def reset(self) -> TextStart:
        return TextStart(messages=(Message(role="user", content="6x7?"),))

    async def step(self, message: Message) -> TextOutcome:
        self.answers.append(message.content)
        is_right = message.content == "42"
        return TextOutcome(
            messages=(),
            reward=float(is_right),
            terminated=True,
            truncated=False,
            info={"is_success": is_right},
        )
