"""Choice of the next token: from logits, among those that a grammar allows, until a stop text.

    grammar ─► compiled once ─► Guide of one reply:  allowed() ─► mask ─► sampled ─► take(token) ─► ...
                     └────────► allowed_masks:       the same masks along a reply, for its log-probs

A row's noise comes from its `Sampling.seed` alone, through a counter-based generator on the CPU: the
same logits and seed give the same tokens on every device, in every batch, so a decision can be repeated
anywhere. Masks are computed by llguidance, both for the engine that samples and for the learner that
computes the log-probs of the sampled tokens, so both restrict the distribution in the same way.
"""

import math
from collections.abc import Sequence
from copy import copy
from functools import cached_property, lru_cache
from typing import Any, Final

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer
from torch import Tensor

from vla_rl.engines.device_lane import to_device
from vla_rl.types import Sampling


def seeded_uniforms(samplings: Sequence[Sampling], num_tokens: int) -> Tensor:
    """Draw float64 [B, num_tokens] in [0, 1), each row from its own `Sampling.seed`."""
    rows = [
        np.random.Generator(np.random.Philox(sampling.seed)).random(num_tokens)
        for sampling in samplings
    ]
    return torch.from_numpy(np.stack(rows))


SMALLEST_UNIFORM: Final = 2.0**-54
"""Least number that `to_normal` converts; of 0 it would make minus infinity."""


def to_normal(uniforms: Tensor) -> Tensor:
    """Turn float64 numbers in [0, 1) into standard normal ones, float32, by the inverse cumulative
    distribution.
    """
    centred = 2.0 * uniforms.clamp(min=SMALLEST_UNIFORM) - 1.0
    return (math.sqrt(2.0) * torch.erfinv(centred)).float()


def choose_tokens(
    logits: Tensor, samplings: Sequence[Sampling], uniforms: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Sample by inverting the cumulative distribution; greedy rows take the likeliest token, or the
    one nearest to the mean (`Sampling.by_mean`).

    Args:
        logits: float [B, T, V], before temperature.
        samplings: one per row.
        uniforms: float64 [B, T] in [0, 1), needed unless these are the first T tokens of a
            decision; None draws them.

    Returns: indices into V, int64 [B, T], and their log-probs after temperature, float32 [B, T].
    """
    uniforms = seeded_uniforms(samplings, logits.shape[1]) if uniforms is None else uniforms
    columns = sampling_columns(samplings, logits.device, has_token_means=True)
    chosen, log_probs = choose(logits, *columns, to_device(uniforms, logits.device))
    by_mean = torch.tensor([sampling.greedy and sampling.by_mean for sampling in samplings])
    if not by_mean.any():
        return chosen, log_probs
    tempered = tempered_log_probs(logits, columns[0])
    positions = torch.arange(logits.shape[-1], device=logits.device, dtype=torch.float32)
    middle = (tempered.exp() @ positions).round().long()
    chosen = torch.where(to_device(by_mean, logits.device)[:, None], middle, chosen)
    return chosen, tempered.gather(-1, chosen[..., None])[..., 0]


def sampling_columns(
    samplings: Sequence[Sampling], device: torch.device, *, has_token_means: bool = False
) -> tuple[Tensor, Tensor]:
    """Return temperatures, float32 [B], and whether each row is greedy, bool [B], on a device.

    Raises: ValueError for a temperature of 0, or for `Sampling.by_mean` unless the caller heeds it.
    """
    for sampling in samplings:
        if not has_token_means:
            sampling.require_no_mean()
        if not sampling.temperature > 0.0:
            raise ValueError(
                f"Sampling.temperature is {sampling.temperature}, expected > 0; use "
                "greedy=True instead."
            )
    temperatures = torch.tensor([sampling.temperature for sampling in samplings])
    is_greedy = torch.tensor([sampling.greedy for sampling in samplings])
    return to_device(temperatures, device), to_device(is_greedy, device)


CHOSEN_AT_ONCE: Final = 1 << 17
"""Logits of rows that a CPU samples together. Sums over more, in float64, leave its cache, and memory
of that size is mapped anew in each pass: 64 rows of 49,152 tokens would take 60 instead of 17 ms."""


def choose(
    logits: Tensor, temperatures: Tensor, is_greedy: Tensor, uniforms: Tensor
) -> tuple[Tensor, Tensor]:
    """Do the same as `choose_tokens`, without waiting on the host.

    All inputs are on the logits' device.
    """
    num_rows = max(1, CHOSEN_AT_ONCE // logits.shape[1:].numel())
    if logits.device.type != "cpu" or len(logits) <= num_rows:
        return _choose(logits, temperatures, is_greedy, uniforms)
    columns = (logits, temperatures, is_greedy, uniforms)
    split = (torch.split(each, num_rows) for each in columns)
    parts = [_choose(*part) for part in zip(*split, strict=True)]
    chosen, log_probs = (torch.cat(each) for each in zip(*parts, strict=True))
    return chosen, log_probs


def _choose(
    logits: Tensor, temperatures: Tensor, is_greedy: Tensor, uniforms: Tensor
) -> tuple[Tensor, Tensor]:
    log_probs = tempered_log_probs(logits, temperatures)
    # In float64: near 1 a sum in float32 no longer grows by a token of probability 1e-8, which
    # could then never be sampled.
    cumulative = log_probs.double().exp().cumsum(dim=-1)
    total = cumulative[..., -1:]
    # rounding may lift the noise to the total, which no token's sum exceeds; take the last possible
    # token then
    noise = torch.minimum(
        uniforms[..., None] * total, torch.nextafter(total, torch.zeros_like(total))
    )
    sampled = torch.searchsorted(cumulative, noise, right=True)[..., 0].clamp(
        max=logits.shape[2] - 1
    )
    chosen = torch.where(is_greedy[:, None], log_probs.argmax(dim=-1), sampled)
    return chosen, log_probs.gather(-1, chosen[..., None])[..., 0]


def likeliest_tokens(
    logits: Tensor, samplings: Sequence[Sampling], num: int
) -> tuple[Tensor, Tensor]:
    """Return ids int64 [B, n] and log-probs float32 [B, n], after temperature, of the tokens of
    highest probability; `pair_likeliest` leaves out the impossible ones.

    Args:
        logits: float [B, 1, V], before temperature; -inf marks an impossible token.
        samplings: one per row.
        num: maximum number of tokens for each row.
    """
    temperatures, _ = sampling_columns(samplings, logits.device)
    log_probs = tempered_log_probs(logits, temperatures)[:, 0]
    values, tokens = log_probs.topk(min(num, log_probs.shape[1]))
    return tokens, values


def pair_likeliest(tokens: Tensor, log_probs: Tensor) -> list[list[tuple[int, float]]]:
    """Return the possible tokens of each row with their log-probs, from tensors on the host."""
    rows = zip(tokens.tolist(), log_probs.tolist(), strict=True)
    return [[pair for pair in zip(*row, strict=True) if pair[1] > -torch.inf] for row in rows]


def tempered_log_probs(logits: Tensor, temperatures: Tensor) -> Tensor:
    """Compute log softmax(logits / temperature), float32 [B, T, V], one temperature per row."""
    return torch.log_softmax(logits.float() / temperatures.float()[:, None, None], dim=-1)


MAX_TOKEN_BYTES: Final = 1024
"""Longest token, in bytes, that llguidance accepts; with a longer one it aborts the calling
thread."""

UNPACKED: Final = 256
"""Number of masks unpacked together; each bit needs four bytes while it is unpacked."""

NUM_COMPILED: Final = 64
"""Number of grammars kept compiled; an agent usually uses the same few again and again."""


class Vocabulary:
    """The tokens of one tokenizer.

    Args:
        tokenizer: a fast tokenizer of transformers.
        num_logits: width of the model's output; indices without a token are never allowed.
    """

    def __init__(self, tokenizer: Any, num_logits: int) -> None:
        self._tokenizer, self._num_logits = tokenizer, num_logits
        self._compiled = lru_cache(maxsize=NUM_COMPILED)(self._compile)

    @property
    def num_logits(self) -> int:
        """Upper bound of the token ids, exclusive."""
        return self._num_logits

    def text(self, tokens: Sequence[int]) -> bytes:
        """Return the bytes of some tokens; a special token becomes its name."""
        text: bytes = self._tokens.decode_bytes(list(tokens))
        return text

    def is_special(self, token: int) -> bool:
        """Return whether no text of a grammar matches the token.

        A grammar then has to name it by its id.
        """
        return bool(self._tokens.is_special_token(token))

    def guide(self, grammar: str) -> "Guide":
        """Start a reply under a grammar.

        Raises: ValueError for a grammar that cannot be compiled.
        """
        return Guide(self._compiled(grammar).deep_copy(), self._num_logits)

    def allowed_masks(self, grammar: str, tokens: Sequence[int]) -> Tensor:
        """Return the masks under which the tokens of a reply were sampled.

        They are int32 [T, ceil(num_logits / 32)], one bit per token.

        Raises: ValueError if the grammar does not allow the tokens.
        """
        guide = self.guide(grammar)
        masks = []
        for number, token in enumerate(tokens, start=1):
            mask = guide.allowed()
            masks.append(mask)
            if number < len(tokens):
                guide.advance(token)
            elif not int(mask[token // 32]) >> token % 32 & 1:
                # a reply also ends where its grammar grows too complex to take its last token
                raise ValueError(f"a reply left its grammar with its last token, {token}")
        return torch.stack(masks)

    @cached_property
    def _tokens(self) -> LLTokenizer:
        longest = max(map(len, self._tokenizer.get_vocab()))
        if longest > MAX_TOKEN_BYTES:
            raise ValueError(
                f"the tokenizer's longest token has {longest} bytes, expected at most "
                f"{MAX_TOKEN_BYTES} for grammars, stop texts and reported tokens; train the "
                "tokenizer with shorter ones."
            )
        if self._tokenizer.eos_token_id is None:
            raise ValueError(
                "the tokenizer names no eos_token, expected one: a reply under a "
                "grammar could not end."
            )
        # A copy, because padding and truncation are settings of the tokenizer itself, which the
        # policy goes on using.
        backend = copy(self._tokenizer.backend_tokenizer)
        backend.no_padding()
        backend.no_truncation()
        # built as vLLM builds it, so that both allow the same tokens
        num_tokens = max(self._num_logits, len(self._tokenizer))
        return LLTokenizer(
            backend.to_str(), n_vocab=num_tokens, eos_token=self._tokenizer.eos_token_id
        )

    def _compile(self, grammar: str) -> LLMatcher:
        matcher = LLMatcher(self._tokens, grammar, log_level=0)
        if matcher.is_error():
            raise ValueError(f"the grammar cannot be compiled: {matcher.get_error()}")
        return matcher


class Guide:
    """The position of one reply in its grammar."""

    def __init__(self, matcher: LLMatcher, num_logits: int) -> None:
        self._matcher, self._num_words = matcher, -(-num_logits // 32)

    def allowed(self) -> Tensor:
        """Return the allowed tokens, int32 [ceil(num_logits / 32)], one bit each.

        At the grammar's end it is only the end token.

        Raises: ValueError if the grammar has grown too complex.
        """
        # The tokenizer may have more tokens than the network's output has places.
        words = np.frombuffer(self._matcher.compute_bitmask(), np.int32)[: self._num_words]
        self._require_no_error()
        return torch.from_numpy(words.copy())

    def advance(self, token: int) -> None:
        """Advance by the next token of the reply.

        Raises: ValueError if the grammar does not allow it.
        """
        self._matcher.consume_token(token)
        self._require_no_error()

    def _require_no_error(self) -> None:
        if self._matcher.is_error():
            raise ValueError(f"a reply left its grammar: {self._matcher.get_error()}")


def forbidden(masks: Tensor, num_logits: int) -> Tensor:
    """Return the tokens, bool [N, num_logits], whose bits are not set in masks.

    Masks are int32 [N, ceil(num_logits / 32)].
    """
    bits = torch.arange(32, dtype=torch.int32, device=masks.device)
    parts = [
        (part[..., None] >> bits & 1).flatten(1)[:, :num_logits] == 0
        for part in torch.split(masks, UNPACKED)
    ]
    return torch.cat(parts)


class StopWatch:
    """Looks for stop texts in a reply that grows token by token.

    Args:
        vocabulary: vocabulary of the reply's tokens.
        stop: stop texts, none of them empty.
    """

    def __init__(self, vocabulary: Vocabulary, stop: Sequence[str]) -> None:
        self._vocabulary, self._stop = vocabulary, tuple(stop)
        self._longest = max(len(text.encode()) for text in stop)
        self._tail = b""

    def completed_stop(self, token: int) -> str | None:
        """Add a token and return the stop text that its bytes complete, if any.

        Of several, return the one that begins first.
        """
        # Bytes and not letters, because a stop text may begin or end inside of a token, and a
        # letter may be spread over two.
        text = self._tail + self._vocabulary.text([token])
        self._tail = text[-self._longest + 1 :] if self._longest > 1 else b""
        return first_stop(text, self._stop)


def first_stop(text: bytes, stop: Sequence[str]) -> str | None:
    """Return the stop text that begins first in `text`, or None if there is none."""
    positions = {each: text.find(each.encode()) for each in stop}
    return min(
        (each for each, position in positions.items() if position >= 0),
        key=positions.__getitem__,
        default=None,
    )
