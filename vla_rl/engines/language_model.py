"""Methods that an engine needs from a language model besides the learner's.

They are its chat interface and its memory.

    messages, tools ─► render ─► prompt tokens ─► extend ─► logits of the next token ─► ... ─► parse ─► Message
                                                     ▲
                                                 KeyValues: one slot per conversation

The chat interface runs on the CPU in any thread; `extend` and `KeyValues` run on the device lane.
`vla_rl/models/language` implements this for models that transformers loads.
"""

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

from torch import Tensor

from vla_rl.engines.chat_interface import ChatInterface, SeenPrompt, SeesImages
from vla_rl.engines.policy_model import TokenModel

BatchT = TypeVar("BatchT")


class KeyValues(Protocol):
    """Attention keys and values of several conversations, one slot each."""

    def copy_prefix(self, source: int, target: int, num_tokens: int) -> None:
        """Copy the first tokens of one slot to another slot."""
        ...

    def swap(self, first: int, second: int) -> None:
        """Exchange two slots."""
        ...


@runtime_checkable
class LanguageModel(TokenModel[BatchT], ChatInterface, Protocol[BatchT]):
    """A policy whose decisions are whole replies, of any length.

    Observations hold `prompt_tokens`, int64 [P], and `grammars`, one (start, stop, grammar) for
    each part of the reply that was sampled under a grammar.
    """

    @property
    def context_size(self) -> int:
        """Maximum number of tokens of a prompt and its reply together."""
        ...

    def key_values(self, num_slots: int) -> KeyValues:
        """Allocate memory for `num_slots` conversations; it grows with the longest of them."""
        ...

    def extend(
        self,
        memory: Any,
        slots: Sequence[int],
        starts: Sequence[int],
        tokens: Sequence[Sequence[int]],
    ) -> Tensor:
        """Read more tokens of some conversations.

        Row i's `tokens` follow the `starts[i]` tokens that slot `slots[i]` holds.

        Args:
            memory: returned by `key_values`.
            slots: slot of each row; no slot twice.
            starts: number of tokens that each slot already holds.
            tokens: tokens to read, at least one per row.

        Returns: logits of the token after each row's last, float32 [B, V], without gradient.
        """
        ...


class SeeingLanguageModel(LanguageModel[BatchT], SeesImages, Protocol[BatchT]):
    """A language model that reads images too."""

    def extend(
        self,
        memory: Any,
        slots: Sequence[int],
        starts: Sequence[int],
        tokens: Sequence[Sequence[int]],
        seen: Sequence[SeenPrompt | None] = (),
    ) -> Tensor:
        """Read more tokens of some conversations, as `LanguageModel.extend` does.

        Args:
            memory, slots, starts, tokens: as there.
            seen: for each row its prompt with images, or None; empty if no row has any.
        """
        ...
