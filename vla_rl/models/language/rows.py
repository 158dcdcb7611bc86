"""Rows of a language policy: tokens of conversations, on their way through a network.

Rows of different lengths go through the trunk on padded lines, or end to end on one:

    about one length        ████████   each row on a line; causal attention needs no mask
                            ██████··
    one much longer         ████████████ ██ ███   all on one line, where none sees another

Generation keeps the attention's keys and values in slots (`SlotKeyValues`, with the cache interface
of transformers' attention layers). A slot holds one conversation from its first token on, without
padding. The layers of one forward pass write the rows' new keys at the rows' own positions and get
back all that the rows may attend to; a mask hides what lies beyond each end.

Learning scores chosen tokens without the logits of all positions at one time:

    hidden [N, D] ─► head, temperature, log-softmax ─► log-prob and entropy of N tokens, float32 [N]
                     a chunk of positions at a time; in the backward pass computed once more

For 8,192 positions and 152,000 tokens the logits alone take 5 GB in float32, and their gradient,
softmax and entropy as much again. A chunk's memory depends on neither number.

Legend of shapes: S slots, H heads, L positions, D channels of a head.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Final, Self, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from vla_rl.algorithms import entropy
from vla_rl.engines.device_lane import to_device
from vla_rl.engines.sampling import tempered_log_probs
from vla_rl.errors import ConfigError
from vla_rl.models.attention import PackedRows
from vla_rl.types import Observation


@dataclasses.dataclass(frozen=True)
class Prompts:
    """Prompts of different lengths.

    Example:
        Prompts(tokens=(np.array([1, 512, 29901]), np.array([1, 512])), grammars=((), ((0, 4, lark),)))
    """

    tokens: tuple[np.ndarray, ...]
    """Tokens of each prompt, int64 [P]."""

    grammars: tuple[tuple[tuple[int, int, str], ...], ...] = ()
    """Parts (start, stop, grammar) of each prompt's reply that were sampled under a grammar; empty
    if no reply has any."""

    @classmethod
    def from_observations(cls, observations: Sequence[Observation], vocab_size: int) -> Self:
        """Read the prompts of observations.

        Raises: ValueError if `prompt_tokens` is missing, empty, or has unknown tokens.
        """
        return cls(
            tokens=tuple(_check_prompt(observation, vocab_size) for observation in observations),
            grammars=tuple(tuple(observation.get("grammars", ())) for observation in observations),
        )


def _check_prompt(observation: Observation, vocab_size: int) -> np.ndarray:
    prompt = np.asarray(observation.get("prompt_tokens", ()))
    # An id beyond the table would end a GPU process with a device assertion, far from its cause.
    if prompt.ndim != 1 or len(prompt) == 0 or prompt.dtype.kind != "i":
        raise ValueError(
            f"observation['prompt_tokens'] is {prompt.dtype} {list(prompt.shape)}, expected "
            "int64 [P] with P >= 1; was the episode run by chat_agent?"
        )
    if prompt.min() < 0 or prompt.max() >= vocab_size:
        raise ValueError(
            f"observation['prompt_tokens'] holds token {prompt.max()}, expected 0 to "
            f"{vocab_size - 1}."
        )
    return prompt


RowInputs = Callable[[Tensor, Sequence[int]], dict[str, Tensor]]
"""Returns the trunk's inputs for whole rows, of the tokens int64 [N, W] on their lines, on the
host, and of the position of each row's first token in the flattened lines."""


def read_rows(
    trunk: Any, rows: Sequence[Tensor], inputs: RowInputs, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return hidden states, [L, feature_size], and each row's offset in them, int64 [B].

    Args:
        trunk: the part of a network from embedded tokens to hidden states.
        rows: tokens of each row, int64 [P].
        inputs: the trunk's inputs.
        device: device of the trunk.

    Raises: ConfigError if rows are read end to end and would see each other.
    """
    lengths = [len(row) for row in rows]
    # padding would take more than the rows: the two shortest fit into the space of the longest
    if sum(sorted(lengths)[:2]) <= max(lengths) and len(rows) > 1:
        return _read_packed(trunk, rows, inputs, device)
    tokens = torch.zeros(len(rows), max(lengths), dtype=torch.long)
    for line, row in zip(tokens, rows, strict=True):
        line[: len(row)] = row
    starts = torch.arange(len(rows)) * tokens.shape[1]
    hidden: Tensor = trunk(**inputs(tokens, starts.tolist()), use_cache=False).last_hidden_state
    return hidden.flatten(0, 1), starts


def _read_packed(
    trunk: Any, rows: Sequence[Tensor], inputs: RowInputs, device: torch.device
) -> tuple[Tensor, Tensor]:
    lengths = [len(row) for row in rows]
    # The offsets are uploaded once; every layer reads them.
    packed = PackedRows.from_lengths(lengths, device)
    starts = torch.tensor(lengths).cumsum(0) - torch.tensor(lengths)
    given = inputs(torch.cat(list(rows))[None], starts.tolist())
    hidden: Tensor = trunk(**given, use_cache=False, packed=packed).last_hidden_state
    if not packed.are_read:
        raise ConfigError(
            f"{type(trunk).__name__} does not hand the rows of a line on to its attention, so "
            "they would see each other; set no limit of tokens for its micro-batches"
        )
    return hidden[0], starts


def reply_offsets(ends: Tensor, starts: Tensor, replies: Sequence[Tensor]) -> Tensor:
    """Return the offset from which each reply token is chosen, int64 [N], end to end.

    Args:
        ends: offset of each prompt's last token, int64 [B].
        starts: offset of each reply's first token, int64 [B].
        replies: tokens of each reply, int64 [T].
    """
    # the first token is chosen after the prompt's last one, each other after the one before it
    return torch.cat(
        [
            torch.cat([end[None], start + torch.arange(len(reply))])[: len(reply)]
            for end, start, reply in zip(ends, starts, replies, strict=True)
        ]
    )


GROWTH: Final = 64
"""Memory grows in multiples of this many positions."""


class SlotKeyValues:
    """Keys and values of `num_slots` conversations. Allocated at the first forward pass, and again
    when a conversation outgrows them.
    """

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._layers: list[tuple[Tensor, Tensor]] = []
        self._slots = torch.zeros(0, dtype=torch.long)
        self._positions = torch.zeros(0, 0, dtype=torch.long)
        self._num_first = 0
        self._length = self._needed = 0

    def begin(
        self, slots: Sequence[int], positions: Tensor, length: int, device: torch.device
    ) -> None:
        """Set where the next forward pass writes, int64 [B, Q], and how many positions it attends
        to.

        Args:
            slots: slot of each row.
            positions: positions of its new tokens, on the host.
            length: positions that the rows attend to.
            device: device of the keys and values.
        """
        self._slots, self._positions = (
            to_device(each, device) for each in (torch.tensor(slots), positions)
        )
        self._length, self._needed = length, int(positions.max()) + 1
        # the first slots in order are a view; any others are gathered
        self._num_first = len(slots) if list(slots) == list(range(len(slots))) else 0
        if self._layers and self._layers[0][0].shape[2] < self._needed:
            self._layers = [
                (_grow(keys, self._needed), _grow(values, self._needed))
                for keys, values in self._layers
            ]

    def update(
        self, keys: Tensor, values: Tensor, layer: int, _: object = None
    ) -> tuple[Tensor, Tensor]:
        """Store an attention layer's new keys and values [B, H, Q, D].

        Return all that the rows attend to, [B, H, L, D].
        """
        if layer == len(self._layers):
            self._layers.append((self._empty(keys), self._empty(values)))
        own_keys, own_values = self._layers[layer]
        rows = self._slots[:, None]
        own_keys[rows, :, self._positions] = keys.transpose(1, 2)
        own_values[rows, :, self._positions] = values.transpose(1, 2)
        if self._num_first:
            return own_keys[: self._num_first, :, : self._length], own_values[
                : self._num_first, :, : self._length
            ]
        return own_keys[self._slots, :, : self._length], own_values[self._slots, :, : self._length]

    def get_seq_length(self, layer: int = 0) -> int:
        """Return 0: transformers asks only if no positions are given, and they always are."""
        del layer
        return 0

    @torch.inference_mode()
    def copy_prefix(self, source: int, target: int, num_tokens: int) -> None:
        """Copy the first tokens of one slot into another."""
        for tensor in self._tensors():
            tensor[target, :, :num_tokens] = tensor[source, :, :num_tokens]

    @torch.inference_mode()
    def swap(self, first: int, second: int) -> None:
        """Exchange two slots."""
        for tensor in self._tensors():
            kept = tensor[first].clone()
            tensor[first] = tensor[second]
            tensor[second] = kept

    def _tensors(self) -> list[Tensor]:
        return [tensor for layer in self._layers for tensor in layer]

    def _empty(self, like: Tensor) -> Tensor:
        length = -(-self._needed // GROWTH) * GROWTH
        return like.new_zeros(self._num_slots, like.shape[1], length, like.shape[3])


def _grow(tensor: Tensor, needed: int) -> Tensor:
    # By half at least: memory that grew with each turn would be copied for each.
    length = -(-max(needed, tensor.shape[2] * 3 // 2) // GROWTH) * GROWTH
    grown = tensor.new_zeros(tensor.shape[0], tensor.shape[1], length, tensor.shape[3])
    grown[:, :, : tensor.shape[2]] = tensor
    return grown


def count_token_bytes(config: Any, element_size: int) -> int:
    """Return the bytes of one token's keys and values in all layers.

    Args:
        config: the text configuration of a transformers network.
        element_size: bytes of a number.
    """
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * config.num_hidden_layers * heads * size * element_size)


def extend_rows(
    trunk: Any,
    memory: SlotKeyValues,
    slots: Sequence[int],
    starts: Sequence[int],
    tokens: Sequence[Sequence[int]],
    inputs: Callable[[Tensor, Tensor], dict[str, Tensor]],
    device: torch.device,
) -> Tensor:
    """Read more tokens of conversations; return the hidden state of each row's last one, [B, D].

    Args:
        trunk: the part of a network from embedded tokens to hidden states.
        memory: keys and values of the tokens before.
        slots: slot of each row.
        starts: position of each row's first new token.
        tokens: new tokens of each row.
        inputs: returns the trunk's inputs for padded tokens and their positions in the slots,
            int64 [B, W] each, on the host.
        device: device of the trunk.
    """
    lengths = torch.tensor([len(row) for row in tokens])
    width = int(lengths.max())
    rows = torch.tensor([[*row, *(0 for _ in range(width - len(row)))] for row in tokens])
    positions = torch.tensor(starts)[:, None] + torch.arange(width)
    # a padded token is overwritten before any later token attends to it
    length = int((torch.tensor(starts) + lengths).max())
    memory.begin(slots, positions, length, device)
    given = inputs(rows, positions)
    positions = to_device(positions, device)
    visible = torch.arange(length, device=device)[None, None] <= positions[..., None]
    hidden: Tensor = trunk(
        **given, attention_mask=visible[:, None], past_key_values=memory, use_cache=True
    ).last_hidden_state
    ends = torch.arange(len(rows)) * width + lengths - 1
    return hidden.flatten(0, 1)[to_device(ends, device)]


LOGITS_AT_ONCE: Final = 1 << 26
"""Positions times vocabulary in one chunk: 256 MB of float32 for each tensor of that shape. Fewer
are computed whole, and not twice."""

Forbidden: TypeAlias = Callable[[int, int], Tensor | None]
"""Function of the first position and the one after the last: bool [n, V], True for each token that
could not be chosen there; None if all could."""


def score_tokens(
    head: Callable[[Tensor], Tensor],
    hidden: Tensor,
    chosen: Tensor,
    temperatures: Tensor,
    forbidden: Forbidden,
    *,
    vocab_size: int,
    logits_at_once: int = LOGITS_AT_ONCE,
) -> tuple[Tensor, Tensor]:
    """Return log-probs and entropies, float32 [N] each, with a gradient.

    Args:
        head: maps hidden states [n, D] to logits [n, V].
        hidden: hidden states [N, D], N >= 1.
        chosen: tokens int64 [N].
        temperatures: float32 [N].
        forbidden: tokens whose logits are -inf.
        vocab_size: V.
        logits_at_once: positions times V of one chunk.
    """

    def scored(first: int, hidden: Tensor, chosen: Tensor, temperatures: Tensor) -> Any:
        logits = head(hidden)
        impossible = forbidden(first, first + len(hidden))
        if impossible is not None:
            logits = logits.masked_fill(impossible, -torch.inf)
        log_probs = tempered_log_probs(logits[:, None], temperatures)[:, 0]
        return log_probs.gather(-1, chosen[:, None])[:, 0], entropy(log_probs)

    size = max(1, logits_at_once // vocab_size)
    if len(hidden) <= size:
        whole: tuple[Tensor, Tensor] = scored(0, hidden, chosen, temperatures)
        return whole
    # Each chunk is computed once more in the backward pass, which costs a third of the head's
    # arithmetic and saves its logits.
    columns = (hidden, chosen, temperatures)
    parts = [
        # nothing is random here, so no random state has to be kept
        checkpoint(scored, first, *chunk, use_reentrant=False, preserve_rng_state=False)
        for first, *chunk in zip(
            range(0, len(hidden), size), *(torch.split(each, size) for each in columns), strict=True
        )
    ]
    log_probs, entropies = (torch.cat(each) for each in zip(*parts, strict=True))
    return log_probs, entropies
