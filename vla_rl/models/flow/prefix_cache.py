"""Prefixes of observations that a learner reads several times in an update, kept between its passes.

    epoch 1   observation ─► embed_prefix ─► prefix, kept ─► expert ─► loss
    epoch 2   observation ─► name ─────────► prefix ───────► expert ─► loss

Only a frozen prefix can be kept: a trained one is another after each optimizer step. What has no room is
computed again. A pass whose rows were a pass before gets the very same numbers; in another composition
they differ by float rounding, as those of any two batches do.
"""

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vla_rl.models.flow.network import (
    FlowInputs,
    FlowNetwork,
    FlowProcessor,
    KnownPrefixes,
    Prefix,
    PrefixRow,
)
from vla_rl.types import Observation


class PrefixCache:
    """Prefixes by the name of their observation, at most `max_bytes` of them.

    `prepare` may run in any thread; all else runs on the device lane.
    """

    def __init__(self) -> None:
        self.max_bytes = 0
        """Limit of all tensors together, in bytes; 0 keeps nothing."""

        self.num_bytes = 0
        """Bytes that are kept."""

        self._rows: dict[bytes, PrefixRow] = {}

    def prepare(
        self,
        processor: FlowProcessor,
        observations: Sequence[Observation],
        identities: Sequence[tuple[object, ...]],
        device: torch.device,
    ) -> FlowInputs:
        """Prepare observations; of those whose prefix is kept, neither images nor prompt.

        Args:
            processor: prepares the others.
            observations: B of them.
            identities: what `processor.identify` gives for each.
            device: where the inputs go.
        """
        if self.max_bytes == 0:
            return processor.prepare(observations, device)
        names = tuple(_digest(identity) for identity in identities)
        found = tuple(self._rows.get(name) for name in names)
        missing = [each for each, row in zip(observations, found, strict=True) if row is None]
        # inputs of no row have shapes too, and only a processor knows them
        inputs = processor.prepare(missing or observations[:1], device)
        return inputs.with_known(KnownPrefixes(names, found))

    def embed_prefix(self, network: FlowNetwork, inputs: FlowInputs) -> Prefix:
        """Return the prefix of each of the B observations; keep those that are new."""
        known = inputs.known
        if known is None:
            return network.embed_prefix(inputs)
        rows = dict(enumerate(known.found))
        missing = [number for number, row in rows.items() if row is None]
        if missing:
            prefix = network.embed_prefix(inputs)
            computed = [PrefixRow(prefix, index) for index in range(len(missing))]
            rows |= dict(zip(missing, computed, strict=True))
            self._add([known.names[number] for number in missing], prefix)
        return join_rows([row for row in rows.values() if row is not None])

    def clear(self) -> int:
        """Forget all prefixes; return how many bytes they took."""
        num_bytes, self.num_bytes = self.num_bytes, 0
        self._rows = {}
        return num_bytes

    def _add(self, names: Sequence[bytes], prefix: Prefix) -> None:
        # autograd refuses tensors of an inference pass
        if torch.is_inference_mode_enabled():
            return
        each = prefix.num_bytes // len(names)
        fitting = min(len(names), (self.max_bytes - self.num_bytes) // max(each, 1))
        if fitting <= 0:
            return
        if fitting < len(names):
            # copies: a view of some rows would hold the memory of all
            prefix = prefix.rows(torch.arange(fitting, device=prefix.mask.device))
        for row, name in enumerate(names[:fitting]):
            self._rows[name] = PrefixRow(prefix, row)
        self.num_bytes += prefix.num_bytes


def is_frozen(parameters: Iterable[nn.Parameter]) -> bool:
    """Return whether no parameter of a prefix is trained."""
    return not any(parameter.requires_grad for parameter in parameters)


def join_rows(rows: Sequence[PrefixRow]) -> Prefix:
    """Return rows of several prefixes as one; shorter ones are padded, which attention masks."""
    first = rows[0].prefix
    is_whole = len(rows) == len(first.mask)
    if is_whole and all(each.prefix is first and each.row == row for row, each in enumerate(rows)):
        return first
    length = max(each.prefix.mask.shape[1] for each in rows)

    def stack(pick: Any, axis: int) -> Tensor:
        return torch.stack([_pad(pick(each.prefix)[each.row], axis, length) for each in rows])

    layers = range(len(first.keys))
    return Prefix(
        tuple(stack(lambda prefix, layer=layer: prefix.keys[layer], 1) for layer in layers),
        tuple(stack(lambda prefix, layer=layer: prefix.values[layer], 1) for layer in layers),
        stack(lambda prefix: prefix.mask, 0),
        stack(lambda prefix: prefix.positions, 0),
        stack(lambda prefix: prefix.output, 0),
        torch.stack([each.prefix.state[each.row] for each in rows]),
    )


def _pad(values: Tensor, axis: int, length: int) -> Tensor:
    """Append zeros (False in a mask) along an axis up to a length."""
    missing = length - values.shape[axis]
    if not missing:
        return values
    shape = list(values.shape)
    shape[axis] = missing
    return torch.cat([values, values.new_zeros(shape)], axis)


def _digest(identity: tuple[object, ...]) -> bytes:
    """Return 16 bytes that are equal for equal identities only: images would fill the memory as names."""
    digest = hashlib.blake2b(digest_size=16)
    for part in identity:
        for value in part if isinstance(part, tuple) else (part,):
            data = value if isinstance(value, bytes) else repr(value).encode()
            digest.update(len(data).to_bytes(8, "little"))
            digest.update(data)
    return digest.digest()
