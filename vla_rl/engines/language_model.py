"""What an engine needs of a model that speaks, besides what a learner needs: its chat format, and its memory.

    messages, tools ─► render ─► prompt tokens ─► extend ─► logits of the next token ─► ... ─► parse ─► Message
                                                     ▲
                                                 KeyValues: one slot for each conversation that is held

`render` and `parse` run on the CPU in any thread; `extend` and `KeyValues` live on the device lane.
`vla_rl/models/language` is the family that transformers loads.
"""

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np
from torch import Tensor

from vla_rl.engines.policy_model import TokenModel
from vla_rl.types import Message, ToolSpec

BatchT = TypeVar("BatchT")


class KeyValues(Protocol):
    """Attention keys and values of several conversations, each in a slot of its own."""

    def copy_prefix(self, source: int, target: int, num_tokens: int) -> None:
        """The first tokens of one slot also into another."""
        ...

    def swap(self, first: int, second: int) -> None:
        """Exchange two slots."""
        ...


@runtime_checkable
class LanguageModel(TokenModel[BatchT], Protocol[BatchT]):
    """A policy over replies: one decision is a whole reply, of any length. Observations hold `prompt_tokens`, int64 [P]."""

    @property
    def context_size(self) -> int:
        """Most tokens that a prompt and its reply may have together."""
        ...

    @property
    def stop_tokens(self) -> frozenset[int]:
        """Tokens that end a reply."""
        ...

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> np.ndarray:
        """A conversation as its chat template has it, up to where the reply begins: int64 [P]."""
        ...

    def parse(self, tokens: np.ndarray) -> Message:
        """A reply, int64 [T], as a message; tool calls that cannot be read become `Message.call_errors`, the others have ids
        that are unique in the reply."""
        ...

    def key_values(self, num_slots: int) -> KeyValues:
        """Memory for so many conversations; it grows with the longest of them."""
        ...

    def extend(
        self, memory: Any, slots: Sequence[int], starts: Sequence[int], tokens: Sequence[Sequence[int]]
    ) -> Tensor:
        """Read on in some conversations: row i's `tokens` follow the `starts[i]` tokens that slot `slots[i]` holds.

        Args:
            memory: what `key_values` gave.
            slots: different from each other.
            starts: tokens that each slot holds already.
            tokens: at least one for each row.

        Returns: logits of the token after each row's last, float32 [B, V], without gradient.
        """
        ...
