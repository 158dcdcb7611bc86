"""What an engine needs of a model that speaks, besides what a learner needs: its chat interface, and its memory.

    messages, tools ─► render ─► prompt tokens ─► extend ─► logits of the next token ─► ... ─► parse ─► Message
                                                     ▲
                                                 KeyValues: one slot for each conversation that is held

The chat interface runs on the CPU in any thread; `extend` and `KeyValues` live on the device lane.
`vla_rl/models/language` is the family that transformers loads.
"""

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

from torch import Tensor

from vla_rl.engines.chat_interface import ChatInterface
from vla_rl.engines.policy_model import TokenModel

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
class LanguageModel(TokenModel[BatchT], ChatInterface, Protocol[BatchT]):
    """A policy over replies: one decision is a whole reply, of any length. Observations hold `prompt_tokens`, int64 [P], and
    `grammars`, one (start, stop, grammar) for every part of the reply that was sampled under a grammar."""

    @property
    def context_size(self) -> int:
        """Most tokens that a prompt and its reply may have together."""
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
