"""Continuous batching: replies join and leave a running batch token by token.

None waits for another to end.

    slots   0 ... n-1       running: one token each per forward pass
            n ... S-1       kept: conversations between their turns, or empty

A new reply reuses what a slot already holds of its prompt: a conversation goes on in the slot where
it was kept, and a prompt that begins like another one, images included, copies that part. Keys and
values of older weights are never used: when the weights change, kept conversations are dropped and
running ones are read again, so that every log-prob is that of the weights its version names. All of
this runs on the device lane.
"""

import logging
from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from vla_rl.engines.chat_interface import ImagePrompt
from vla_rl.engines.device_lane import to_device, to_host
from vla_rl.engines.policy_model import LanguageModel
from vla_rl.engines.sampling import (
    Guide,
    StopWatch,
    choose_tokens,
    forbidden,
    likeliest_tokens,
    pair_likeliest,
)
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


BURST: Final = 8
"""Maximum tokens of each running reply in one piece of work on the device lane; new requests and
the learner wait that long."""

READ_TOKENS: Final = 4096
"""Maximum prompt tokens, padding included, in one forward pass; a longer prompt is read alone."""


class Generator:
    """Continuous batching with one model and its memory of keys and values.

    Args:
        model: generates the tokens.
        max_batch: maximum number of replies that run together.
        num_kept: number of conversations kept besides the running ones; the most recently used are
            kept.
    """

    def __init__(self, model: LanguageModel[Any], max_batch: int, num_kept: int) -> None:
        self._model, self._max_batch, self._num_slots = model, max_batch, max_batch + num_kept
        self._reuses = num_kept > 0
        self._version: int | None = None
        self._forget()

    @property
    def num_free(self) -> int:
        """Number of replies that can join now."""
        return self._max_batch - len(self._running)

    @property
    def num_running(self) -> int:
        """Number of running replies."""
        return len(self._running)

    @torch.inference_mode()
    def advance(self, joining: Sequence[Reply], version: int) -> list[Reply]:
        """Add replies to the batch, sample until one is finished, and return the finished ones.

        At most `BURST` tokens of each are sampled.

        Args:
            joining: new replies, at most `num_free`.
            version: version of the model's current weights.
        """
        # Keys and values of older weights would make log-probs of no version at all.
        if version != self._version:
            self._restart_reading(version)
        self._leave([reply for reply in self._running if reply.is_cancelled])
        for reply in joining:
            self._join(reply)
        self._read_prompts()
        # Several tokens in one piece of work, so that loop and lane change hands less often; no
        # more, because new requests and the learner wait that long.
        for _ in range(BURST):
            finished = [reply for reply in self._running if reply.is_over]
            if finished or not self._running:
                self._leave(finished)
                return finished
            self._sample(range(len(self._running)))
        finished = [reply for reply in self._running if reply.is_over]
        self._leave(finished)
        return finished

    def discard_replies(self) -> list[Reply]:
        """Discard all state after a failed forward pass; return the replies that were running."""
        running = self._running
        self._forget()
        return running

    def _forget(self) -> None:
        self._memory = self._model.key_values(self._num_slots)
        self._running: list[Reply] = []
        self._held: list[list[int]] = [[] for _ in range(self._num_slots)]
        self._used_at = [0] * self._num_slots
        self._clock = 0

    def _restart_reading(self, version: int) -> None:
        self._version = version
        self._held = [[] for _ in self._held]
        for reply in self._running:
            reply.num_held = 0

    def _join(self, reply: Reply) -> None:
        """Give a reply the slot behind the last running one.

        It gets as much of its prompt as any slot holds.
        """
        own = len(self._running)
        source, num_shared = self._longest_prefix(reply.compared[: len(reply.prompt)])
        kept = range(own, self._num_slots)
        # One token less counts too: of a prompt that the slot holds to its end, the last token is
        # read again.
        goes_on = source in kept and num_shared >= len(self._held[source]) - 1
        slot = source if goes_on else min(kept, key=lambda number: self._used_at[number])
        if not goes_on and num_shared:
            self._memory.copy_prefix(source, slot, num_shared)
        if slot != own:
            self._swap(slot, own)
        self._held[own] = []
        reply.num_held = num_shared
        self._running.append(reply)

    def _longest_prefix(self, prompt: Sequence[int]) -> tuple[int, int]:
        """Return the slot that holds the longest beginning of a prompt, and its length.

        The last token is always read again.
        """
        best, most = 0, 0
        if self._reuses:
            beginning = np.array(prompt[:-1], np.int64)
            for slot in range(self._num_slots):
                held = self._held_tokens(slot)
                num_same = _num_shared(held, beginning)
                if num_same > most:
                    best, most = slot, num_same
        return best, most

    def _held_tokens(self, slot: int) -> Sequence[int]:
        if slot < len(self._running):
            reply = self._running[slot]
            return reply.compared[: reply.num_held]
        return self._held[slot]

    def _leave(self, gone: Iterable[Reply]) -> None:
        """Keep conversations of some replies, and close the gaps among the running slots."""
        for reply in list(gone):
            slot, last = self._running.index(reply), len(self._running) - 1
            self._clock += 1
            held = reply.compared[: reply.num_held]
            if slot != last:
                self._memory.swap(slot, last)
                self._running[slot] = self._running[last]
            self._running.pop()
            self._held[last], self._used_at[last] = (held if self._reuses else []), self._clock

    def _swap(self, first: int, second: int) -> None:
        self._memory.swap(first, second)
        self._held[first], self._held[second] = self._held[second], self._held[first]
        self._used_at[first], self._used_at[second] = self._used_at[second], self._used_at[first]

    def _read_prompts(self) -> None:
        """Read conversations with more than their last token unread; sample their next token."""
        slots = [slot for slot, reply in enumerate(self._running) if len(reply.unread_tokens) > 1]
        # Prompts of similar length together: a pass computes every row to the length of its
        # longest.
        slots.sort(key=lambda slot: len(self._running[slot].unread_tokens))
        while slots:
            num_rows = len(slots)
            while (
                num_rows > 1
                and num_rows * len(self._running[slots[num_rows - 1]].unread_tokens) > READ_TOKENS
            ):
                num_rows -= 1
            self._sample(slots[:num_rows])
            slots = slots[num_rows:]

    def _sample(self, slots: Sequence[int]) -> None:
        """Read the unread tokens of some slots, and add the next token to each."""
        assert self._version is not None
        replies = [self._running[slot] for slot in slots]
        starts = [reply.num_held for reply in replies]
        image_prompts = [reply.image_prompt for reply in replies]
        # models that read text alone need not know of images
        images = (
            {"image_prompts": image_prompts}
            if any(each is not None for each in image_prompts)
            else {}
        )
        logits = self._model.extend(
            self._memory, list(slots), starts, [reply.unread_tokens for reply in replies], **images
        )
        logits = _under_grammars(logits, replies)[:, None]
        samplings = [reply.sampling for reply in replies]
        uniforms = torch.tensor([[reply.next_uniform] for reply in replies], dtype=torch.float64)
        num_noted = max(reply.num_alternatives for reply in replies)
        # one copy for all: the host waits once for each token
        tokens, log_probs, *likeliest = to_host(
            *choose_tokens(logits, samplings, uniforms),
            *(likeliest_tokens(logits, samplings, num_noted) if num_noted else ()),
        )
        noted = pair_likeliest(*likeliest) if num_noted else [[]] * len(replies)
        chosen = zip(replies, tokens[:, 0].tolist(), log_probs[:, 0].tolist(), noted, strict=True)
        for reply, token, log_prob, alternatives in chosen:
            reply.num_held = len(reply.conversation)
            if not reply.is_over:
                reply.alternatives.append(alternatives[: reply.num_alternatives])
                reply.add_token(token, log_prob, self._version, self._model.stop_tokens)


def _under_grammars(logits: Tensor, replies: Sequence[Reply]) -> Tensor:
    """Set logits, float [B, V], to -inf for each token that a reply's grammar forbids next.

    A grammar that fails ends its reply.
    """
    rows, masks = [], []
    for row, reply in enumerate(replies):
        if reply.guide is None:
            continue
        try:
            # A grammar fails in one reply only, and a batch must not end with it.
            masks.append(reply.guide.allowed())
        except ValueError as error:
            reply.end_early(error)
        else:
            rows.append(row)
    if rows:
        is_forbidden = forbidden(to_device(torch.stack(masks), logits.device), logits.shape[1])
        guided = to_device(torch.tensor(rows), logits.device)
        logits[guided] = logits[guided].masked_fill(is_forbidden, -torch.inf)
    return logits


def _num_shared(held: Sequence[int], prompt: np.ndarray) -> int:
    """Return how many tokens two conversations share from their start."""
    num = min(len(held), len(prompt))
    differs = np.array(held[:num], np.int64) != prompt[:num]
    return int(differs.argmax()) if differs.any() else num
