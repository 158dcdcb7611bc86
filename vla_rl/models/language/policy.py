"""Language policies that transformers loads (Llama, Qwen and similar), behind the interface of
engines and learners.

    prompt_tokens ─┐                            ┌─► hidden states ─► head ─► log-probs of the reply      (learning)
    reply tokens ──┴─► one row, on a line with  ┤
                       others that fit there    └─► hidden state of the prompt's last token              (critic)
    slots of keys and values ─► extend ─► logits of the next token                                        (generation)

Each row starts at position 0, wherever it stands on its line, and attends to its own tokens only.
If each row has a line to itself, it is padded on the right; causal attention then needs no mask.
"""

import copy
import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vla_rl.algorithms import entropy
from vla_rl.engines.atomic_folder import writing_folder
from vla_rl.engines.language_model import LanguageModel
from vla_rl.engines.lines import placed
from vla_rl.engines.policy_model import NO_TOKEN
from vla_rl.engines.sampling import tempered_log_probs
from vla_rl.engines.vocabulary import Vocabulary, forbidden
from vla_rl.models.language import checkpoint
from vla_rl.models.language.chat_format import ChatFormat, parse_reply
from vla_rl.models.language.key_values import SlotKeyValues
from vla_rl.models.language.reply_grammar import reply_grammar
from vla_rl.types import Message, Observation, ReplyOptions, ToolSpec

MARGIN_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True)
class Prompts:
    """Prompts of different lengths."""

    tokens: tuple[np.ndarray, ...]
    """Tokens of each prompt, int64 [P]."""

    grammars: tuple[tuple[tuple[int, int, str], ...], ...] = ()
    """Parts (start, stop, grammar) of each prompt's reply that were sampled under a grammar; empty
    if no reply has any."""


class CausalLanguageModel(LanguageModel[Prompts]):
    """A `LanguageModel` over a causal network of transformers. Build one with `load`, or from parts
    with `tiny`.

    Args:
        network: `LlamaForCausalLM` or similar, with full attention in every layer.
        tokenizer: a transformers tokenizer with a chat template.
        files: the small files of its checkpoint, with tokenizer and configuration.

    Raises: CheckpointError if a layer holds other state than keys and values, or there is no chat
    template.
    """

    def __init__(self, network: Any, tokenizer: Any, files: Mapping[str, bytes]) -> None:
        self._network, self._tokenizer, self._files = network.eval(), tokenizer, dict(files)
        self._stop_tokens = checkpoint.stop_tokens_of(network, tokenizer)
        self._format = ChatFormat(tokenizer, self._stop_tokens)
        checkpoint.require_full_attention(network)

    @classmethod
    def load(
        cls, source: str | Path, *, dtype: torch.dtype = torch.float32
    ) -> "CausalLanguageModel":
        """Load a checkpoint from a local folder, or from the hub by its id; safetensors only, and
        none of its code is run.

        Raises: CheckpointError naming what is missing or does not fit.
        """
        return cls(*checkpoint.read(source, dtype))

    def save(self, folder: Path) -> None:
        """Write a new folder in Hugging Face's layout, whole or not at all.

        Raises: CheckpointError.
        """
        tensors = self.checkpoint_tensors()
        num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        with writing_folder(folder, num_bytes + MARGIN_BYTES) as writer:
            writer.write_tensors(checkpoint.TENSOR_FILE, tensors)
            for name, data in self.checkpoint_files().items():
                writer.write_bytes(name, data)

    def copy(self) -> "CausalLanguageModel":
        """Return the same policy with its own copy of the weights."""
        return CausalLanguageModel(copy.deepcopy(self._network), self._tokenizer, self._files)

    @property
    def network(self) -> nn.Module:
        """The network, which holds the parameters."""
        network: nn.Module = self._network
        return network

    @property
    def feature_size(self) -> int:
        """Width of the hidden states."""
        return int(self._network.config.hidden_size)

    @property
    def context_size(self) -> int:
        """`max_position_embeddings` of its configuration."""
        return int(self._network.config.max_position_embeddings)

    @property
    def stop_tokens(self) -> frozenset[int]:
        """Tokens that end a reply, from the generation configuration and the tokenizer."""
        return self._stop_tokens

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> np.ndarray:
        """Render a conversation up to the beginning of the reply, int64 [P]."""
        return self._format.render(messages, tools)

    def render_whole(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()
    ) -> np.ndarray:
        """Render a conversation up to the end of its last message, int64 [P]."""
        return self._format.render_whole(messages, tools)

    def text_of(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> str:
        """Return a conversation up to the end of its last message as text, by its chat template."""
        return self._format.text_of(messages, tools, add_generation_prompt=False)

    @functools.cached_property
    def vocabulary(self) -> Vocabulary:
        """The tokenizer's tokens as bytes."""
        return Vocabulary(self._tokenizer, int(self._network.config.vocab_size))

    def tokenize(self, text: str) -> np.ndarray:
        """Tokenize plain text, int64 [P]."""
        return self._format.tokenize(text)

    def grammar(self, options: ReplyOptions, tools: Sequence[ToolSpec]) -> str | None:
        """Return a grammar of the replies that satisfy the options; None if every reply does."""
        return reply_grammar(options, tools, self._marker)

    def decode(self, tokens: np.ndarray) -> str:
        """Return the text of a reply, int64 [T]."""
        return self._format.decode(tokens)

    def parse(self, text: str, *, with_tools: bool = True) -> Message:
        """Parse a reply's text into a message.

        Its tool calls are taken out of it if `with_tools`.
        """
        return parse_reply(text) if with_tools else Message(role="assistant", content=text.strip())

    def prepare(self, observations: Sequence[Observation]) -> Prompts:
        """Return the prompts.

        Raises: ValueError if `prompt_tokens` is missing, empty, or has unknown tokens.
        """
        return Prompts(
            tokens=tuple(self._checked(observation) for observation in observations),
            grammars=tuple(tuple(observation.get("grammars", ())) for observation in observations),
        )

    def log_probs(
        self, batch: Prompts, tokens: Tensor, temperatures: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return log-probs and entropies of replies int64 [B, T], with `NO_TOKEN` beyond their
        ends; float32 [B, T] each.
        """
        replies = [reply[: int((reply != NO_TOKEN).sum())] for reply in tokens.cpu()]
        prompts = [torch.from_numpy(prompt) for prompt in batch.tokens]
        hidden, starts = self._read(
            [torch.cat(pair) for pair in zip(prompts, replies, strict=True)]
        )
        before = starts + torch.tensor([len(prompt) for prompt in prompts]) - 1
        last = torch.tensor([max(len(reply) - 1, 0) for reply in replies])
        places = before[:, None] + torch.minimum(torch.arange(tokens.shape[1]), last[:, None])
        logits = self._under_grammars(self._head(hidden[places.to(self._device)]), batch, replies)
        log_probs = tempered_log_probs(logits, temperatures.to(self._device))
        said = tokens.to(self._device).clamp(min=0)
        return log_probs.gather(-1, said[..., None])[..., 0], entropy(log_probs)

    def features(self, batch: Prompts) -> Tensor:
        """Return the hidden state of each prompt's last token, [B, feature_size]."""
        hidden, starts = self._read([torch.from_numpy(prompt) for prompt in batch.tokens])
        ends = starts + torch.tensor([len(prompt) for prompt in batch.tokens]) - 1
        return hidden[ends.to(self._device)]

    def encode(self, actions: np.ndarray) -> np.ndarray:
        """Return the replies, which are tokens already: int64 [B, 1, T] to [B, T]."""
        return actions.reshape(len(actions), -1).astype(np.int64)

    def key_values(self, num_slots: int) -> SlotKeyValues:
        """Make the key and value memory for `num_slots` conversations."""
        return SlotKeyValues(num_slots)

    def extend(
        self,
        memory: SlotKeyValues,
        slots: Sequence[int],
        starts: Sequence[int],
        tokens: Sequence[Sequence[int]],
    ) -> Tensor:
        """Return the logits float32 [B, V] of the token after each row's last."""
        lengths = torch.tensor([len(row) for row in tokens])
        width = int(lengths.max())
        rows = torch.tensor([[*row, *(0 for _ in range(width - len(row)))] for row in tokens])
        positions = torch.tensor(starts)[:, None] + torch.arange(width)
        # a padded token is overwritten before any later token attends to it
        length = int((torch.tensor(starts) + lengths).max())
        visible = torch.arange(length)[None, None] <= positions[..., None]
        with torch.inference_mode():
            memory.begin(slots, positions.to(self._device), length)
            hidden = self._network.base_model(
                input_ids=rows.to(self._device),
                attention_mask=visible[:, None].to(self._device),
                position_ids=positions.to(self._device),
                past_key_values=memory,
                use_cache=True,
            ).last_hidden_state
            last = hidden[torch.arange(len(rows)), lengths - 1]
            logits: Tensor = self._head(last).float()
        return logits

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """Return each parameter once, by transformers' name; views, not copies."""
        return checkpoint.distinct_tensors(self._network)

    def checkpoint_files(self) -> Mapping[str, bytes]:
        """Return configuration, tokenizer and chat template."""
        return self._files

    def load_checkpoint_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy tensors into the network; every name and shape has to match."""
        checkpoint.load_tensors(self._network, tensors)

    def _read(self, rows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return the hidden states of all lines end to end, [L, feature_size], and each row's
        offset in them, int64 [B].
        """
        lengths = [len(row) for row in rows]
        width = max(lengths)
        longest_first = sorted(range(len(rows)), key=lambda row: -lengths[row])
        places = placed([lengths[row] for row in longest_first], width)
        num_lines = max(place.line for place in places) + 1
        tokens, positions = torch.zeros(2, num_lines, width, dtype=torch.long)
        owner = torch.full((num_lines, width), -1)
        starts = torch.zeros(len(rows), dtype=torch.long)
        for row, place in zip(longest_first, places, strict=True):
            taken = slice(place.start, place.start + lengths[row])
            tokens[place.line, taken] = rows[row]
            positions[place.line, taken] = torch.arange(lengths[row])
            owner[place.line, taken] = row
            starts[row] = place.line * width + place.start
        shared: dict[str, Tensor] = {}
        if num_lines < len(rows):
            visible = (owner[:, :, None] == owner[:, None, :]).tril()
            shared = {
                "attention_mask": visible[:, None].to(self._device),
                "position_ids": positions.to(self._device),
            }
        network = self._network.base_model
        hidden: Tensor = network(
            input_ids=tokens.to(self._device), use_cache=False, **shared
        ).last_hidden_state
        return hidden.flatten(0, 1), starts

    def _under_grammars(self, logits: Tensor, batch: Prompts, replies: Sequence[Tensor]) -> Tensor:
        """Return [B, T, V] with -inf for each token that the grammar forbade there, so that
        training matches sampling.
        """
        if not any(batch.grammars):
            return logits
        is_forbidden = torch.zeros(logits.shape, dtype=torch.bool, device=logits.device)
        for row, parts in enumerate(batch.grammars):
            for start, stop, grammar in parts:
                masks = self.vocabulary.allowed_masks(grammar, replies[row][start:stop].tolist())
                is_forbidden[row, start:stop] = forbidden(masks.to(logits.device), logits.shape[2])
        return logits.masked_fill(is_forbidden, -torch.inf)

    def _marker(self, name: str) -> str:
        """Return the terminal of a grammar for a text that delimits tool calls: special tokens by
        id, others spelt out.
        """
        token = self._tokenizer.get_vocab().get(name)
        is_special = token is not None and self.vocabulary.is_special(token)
        return f"<[{token}]>" if is_special else json.dumps(name)

    def _head(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self._network.get_output_embeddings()(hidden)
        return logits

    def _checked(self, observation: Observation) -> np.ndarray:
        prompt = np.asarray(observation.get("prompt_tokens", ()))
        if prompt.ndim != 1 or len(prompt) == 0 or prompt.dtype.kind != "i":
            raise ValueError(
                f"observation['prompt_tokens'] is {prompt.dtype} {list(prompt.shape)}, expected "
                "int64 [P] with P >= 1; was "
                "the episode run by chat_agent?"
            )
        vocabulary = self._network.config.vocab_size
        if prompt.min() < 0 or prompt.max() >= vocabulary:
            raise ValueError(
                f"observation['prompt_tokens'] holds token {prompt.max()}, expected 0 to "
                f"{vocabulary - 1}."
            )
        return prompt

    @property
    def _device(self) -> torch.device:
        device: torch.device = next(self._network.parameters()).device
        return device
