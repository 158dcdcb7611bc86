"""A reply of the engine in this process, which grows token by token."""

import logging
from typing import Final

import numpy as np

from vla_rl.engines.chat_interface import ImagePrompt
from vla_rl.engines.sampling import Guide, StopWatch
from vla_rl.types import FinishReason, Sampling

_log: Final = logging.getLogger(__name__)


class Reply:
    """A reply that grows token by token. The generator owns it until it is finished.

    Args:
        prompt: int64 [P], P >= 1.
        sampling: temperature, or greedy, and the seed of all its tokens.
        max_tokens: maximum number of tokens of the reply, >= 1.
        guide: position of the reply in its grammar, if it has one.
        stop_watch: finds texts that end the reply, if there are any.
        num_alternatives: number of likeliest tokens recorded beside each sampled one.
        image_prompt: the prompt as the model reads it, if it has images.
    """

    def __init__(
        self,
        prompt: np.ndarray,
        sampling: Sampling,
        max_tokens: int,
        guide: Guide | None = None,
        stop_watch: StopWatch | None = None,
        num_alternatives: int = 0,
        image_prompt: ImagePrompt | None = None,
    ) -> None:
        if not sampling.temperature > 0.0:
            raise ValueError(
                f"Sampling.temperature is {sampling.temperature}, expected > 0; use "
                "greedy=True instead."
            )
        sampling.require_no_mean()
        self.prompt, self.sampling, self.max_tokens = prompt, sampling, max_tokens
        self.guide, self.num_alternatives = guide, num_alternatives
        self._stop_watch = stop_watch
        self.image_prompt = image_prompt
        self.conversation: list[int] = prompt.tolist()
        """Tokens of the prompt, then of the reply."""

        self.compared: list[int] = (
            self.conversation if image_prompt is None else image_prompt.compared.tolist()
        )
        """The same, with the contents of images: what a slot holds is reused only if these numbers
        are equal."""

        self.log_probs: list[float] = []
        self.versions: list[int] = []
        self.alternatives: list[list[tuple[int, float]]] = []
        """Ids and log-probs of the likeliest tokens at each place of the reply."""

        self.finish_reason: FinishReason | None = None
        self.stopped_by: str | None = None
        self.failure: ValueError | None = None
        """Reason why this reply alone has no token: its grammar allows none, or is too complex."""

        self.is_cancelled = False
        """Set by the caller when it no longer waits; the reply then leaves the batch before its
        next token."""

        self.num_held = 0
        """Tokens of the conversation whose keys and values are in its slot, computed with the
        current weights."""

        # All of them at once and by the token's index: with a generator that is drawn from step by
        # step, the noise of a token would depend on what ran beside it.
        self._uniforms = np.random.Generator(np.random.Philox(sampling.seed)).random(max_tokens)

    @property
    def is_over(self) -> bool:
        """Whether the reply is complete or cannot go on."""
        return self.finish_reason is not None or self.failure is not None

    @property
    def tokens(self) -> np.ndarray:
        """Tokens of the reply so far, int64 [T]."""
        return np.array(self.conversation[len(self.prompt) :], np.int64)

    @property
    def next_uniform(self) -> float:
        """Return the uniform number that the next token is drawn with.

        It depends only on the seed and the token's index.
        """
        return float(self._uniforms[len(self.log_probs)])

    @property
    def unread_tokens(self) -> list[int]:
        """Tokens that the model has not read yet, at least one."""
        return self.conversation[self.num_held :]

    def add_token(
        self, token: int, log_prob: float, version: int, stop_tokens: frozenset[int]
    ) -> None:
        """Add one token, sampled with the weights of `version`."""
        self.conversation.append(token)
        # Without images the two are one list, which would grow twice.
        if self.compared is not self.conversation:
            self.compared.append(token)
        self.log_probs.append(log_prob)
        self.versions.append(version)
        if token in stop_tokens:
            self.finish_reason = "stop"
            return
        if self._stop_watch is not None:
            self.stopped_by = self._stop_watch.completed_stop(token)
        if self.stopped_by is not None:
            self.finish_reason = "stop"
        elif len(self.log_probs) == self.max_tokens:
            self.finish_reason = "length"
        elif self.guide is not None:
            try:
                self.guide.advance(token)
            except ValueError as error:
                self.end_early(error)

    def end_early(self, error: ValueError) -> None:
        """End the reply here, as if it were out of tokens: its grammar cannot go on.

        The tokens so far were sampled under it. A reply without any has failed.
        """
        if not self.log_probs:
            self.failure = error
            return
        _log.warning("a reply ends after %d tokens: %s", len(self.log_probs), error)
        self.finish_reason = "length"
