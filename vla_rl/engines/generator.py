"""Continuous batching: replies join and leave a running batch token by token.

None waits for another to end.

    slots   0 ... n-1       running: one token each per forward pass
            n ... S-1       kept: conversations between their turns, or empty

A new reply reuses what a slot already holds of its prompt: a conversation goes on in the slot where
it was kept, and a prompt that begins like another one, images included, copies that part. Of prompts
that join together, a beginning that they share is read once (`shared_beginnings`), such as the prompt
of a group.

Keys and values of older weights are never used: when the weights change, kept conversations are
dropped and running ones are read again, so that every log-prob is that of the weights its version
names. All of this runs on the device lane.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from vla_rl.engines.device_lane import to_device, to_host
from vla_rl.engines.policy_model import LanguageModel
from vla_rl.engines.reply import Reply
from vla_rl.engines.sampling import choose_tokens, forbidden, likeliest_tokens, pair_likeliest
from vla_rl.engines.shared_beginnings import count_shared, plan_reading

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
        shares: whether replies that run together share the beginnings of their prompts.
    """

    def __init__(
        self, model: LanguageModel[Any], max_batch: int, num_kept: int, *, shares: bool
    ) -> None:
        self._model, self._max_batch, self._num_slots = model, max_batch, max_batch + num_kept
        self._keeps, self._shares = num_kept > 0, shares
        self._version: int | None = None
        self._num_prompt_tokens = self._num_reused = 0
        self._forget()

    @property
    def num_free(self) -> int:
        """Number of replies that can join now."""
        return self._max_batch - len(self._running)

    @property
    def num_running(self) -> int:
        """Number of running replies."""
        return len(self._running)

    @property
    def reused_share(self) -> float:
        """Share of the prompt tokens of all replies so far that were not computed for them, but
        held from the turn before or copied from another conversation.

        A prompt that is read again because the weights changed counts again.
        """
        return self._num_reused / max(self._num_prompt_tokens, 1)

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
            self._num_prompt_tokens += len(reply.prompt)

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
        self._num_prompt_tokens += len(reply.prompt)
        self._num_reused += num_shared

    def _longest_prefix(self, prompt: Sequence[int]) -> tuple[int, int]:
        """Return the slot that holds the longest beginning of a prompt, and its length.

        The last token is always read again.
        """
        best, most = 0, 0
        if self._shares:
            beginning = np.array(prompt[:-1], np.int64)
            for slot in range(self._num_slots):
                held = self._held_tokens(slot)
                num_same = count_shared(np.array(held[: len(beginning)], np.int64), beginning)
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
            self._held[last], self._used_at[last] = (held if self._keeps else []), self._clock

    def _swap(self, first: int, second: int) -> None:
        self._memory.swap(first, second)
        self._held[first], self._held[second] = self._held[second], self._held[first]
        self._used_at[first], self._used_at[second] = self._used_at[second], self._used_at[first]

    def _read_prompts(self) -> None:
        """Read conversations with more than their last token unread; sample their next token.

        What several of them begin with is read once. A reply that copied all but its last token is
        left to the next pass over the running ones.
        """
        while slots := [
            slot for slot, reply in enumerate(self._running) if len(reply.unread_tokens) > 1
        ]:
            if not self._shares:
                self._read(slots)
                continue
            replies = [self._running[slot] for slot in slots]
            plan = plan_reading(
                [np.array(reply.compared, np.int64) for reply in replies],
                [reply.num_held for reply in replies],
            )
            self._read([slots[number] for number in plan.reads])
            for number, copy in plan.copies.items():
                reply = replies[number]
                self._memory.copy_prefix(slots[copy.source], slots[number], copy.num_tokens)
                self._num_reused += max(0, min(copy.num_tokens, len(reply.prompt)) - reply.num_held)
                reply.num_held = copy.num_tokens

    def _read(self, slots: list[int]) -> None:
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
