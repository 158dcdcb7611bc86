"""Attention keys and values in slots, with the cache interface of transformers' attention layers.

Legend: S slots, H heads, L positions, D channels of a head.
A slot holds one conversation from its first token on, without padding. The layers of one forward
pass write the rows' new keys at the rows' own positions and get back all that the rows may attend
to; a mask hides what lies beyond each end.
"""

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from vla_rl.engines.device_lane import to_device

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
                (_grown(keys, self._needed), _grown(values, self._needed))
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


def _grown(tensor: Tensor, needed: int) -> Tensor:
    length = -(-max(needed, tensor.shape[2] * 3 // 2) // GROWTH) * GROWTH
    grown = tensor.new_zeros(tensor.shape[0], tensor.shape[1], length, tensor.shape[3])
    grown[:, :, : tensor.shape[2]] = tensor
    return grown


def bytes_of_token(config: Any, element_size: int) -> int:
    """Return the bytes of one token's keys and values in all layers.

    Args:
        config: the text configuration of a transformers network.
        element_size: bytes of a number.
    """
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * config.num_hidden_layers * heads * size * element_size)
