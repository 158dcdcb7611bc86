"""Language policies that transformers loads, such as Llama or Qwen, behind the interface that engines
use.

    prompt_tokens ─┐                            ┌─► hidden states ─► head ─► log-probs of the reply      (learning)
    reply tokens ──┴─► one row, padded, or end  ┤
                       to end with the others   └─► hidden state of the prompt's last token              (critic)
    slots of keys and values ─► extend ─► logits of the next token                                        (generation)

Each row starts at position 0, wherever it stands, and attends to its own tokens only. Rows of about
one length are padded on the right; causal attention then needs no mask. If two of them would fit in
the space of the longest, all are read end to end on one line, without padding. Rows with an equal
prompt share it while learning (`shared_prompts`).
"""

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor, nn

from vla_rl.engines.chat_interface import process_images
from vla_rl.engines.device_lane import to_device
from vla_rl.engines.policy_model import NO_TOKEN, LanguageModel
from vla_rl.engines.sampling import Vocabulary
from vla_rl.learner.imitation import Demonstration
from vla_rl.learner.plan import TensorPlan, no_tensor_plan_error
from vla_rl.models.attention import use_given_masks
from vla_rl.models.blocks import decoder_plan
from vla_rl.models.language import checkpoint, network_checks
from vla_rl.models.language.chat_format import ChatFormat, parse_reply
from vla_rl.models.language.grammars import (
    mask_forbidden_tokens,
    reply_grammar,
    spell_marker,
)
from vla_rl.models.language.rows import (
    Prompts,
    SlotKeyValues,
    count_token_bytes,
    extend_rows,
    read_rows,
    reply_offsets,
    score_tokens,
)
from vla_rl.models.language.shared_prompts import share_prompts
from vla_rl.models.small_files import save_folder
from vla_rl.types import Message, Observation, ReplyOptions, ToolSpec, make_conversation_observation

TENSOR_PLANS = frozenset({"llama", "qwen2", "qwen3"})
"""Kinds of networks whose layers tensor parallelism cuts."""


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

    reads_images: ClassVar[bool] = False
    """Whether its checkpoints have a vision tower."""

    vllm_form: ClassVar[str] = "vla_rl.models.vllm.served_language:serve_language"
    """Function that returns the form that vLLM engines serve."""

    def __init__(self, network: Any, tokenizer: Any, files: Mapping[str, bytes]) -> None:
        self._network, self._tokenizer, self._files = network.eval(), tokenizer, dict(files)
        self._text_config = network.config.get_text_config()
        self._stop_tokens = checkpoint.get_stop_tokens(network, tokenizer)
        self._format = self._chat_format()
        checkpoint.require_full_attention(network)
        use_given_masks(network)

    @classmethod
    def load(cls, source: str | Path, *, dtype: torch.dtype = torch.float32) -> Self:
        """Load a folder, or a checkpoint of the hub by its id; safetensors only, and none of its code is run.

        Raises: CheckpointError naming what is missing or does not fit.
        """
        policy = cls(*checkpoint.read(source, dtype, with_images=cls.reads_images))
        network_checks.require_readable(policy, source)
        return policy

    def save(self, folder: Path) -> None:
        """Write a new folder in Hugging Face's layout, whole or not at all. Raises: CheckpointError."""
        save_folder(folder, self.checkpoint_tensors(), self.checkpoint_files())

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
        return int(self._text_config.hidden_size)

    @property
    def context_size(self) -> int:
        """Most tokens of a conversation, by its configuration."""
        return network_checks.get_context_size(self._text_config)

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

    def render_text(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> str:
        """Return a conversation up to the end of its last message as text, by its chat template."""
        return self._format.render_text(messages, tools, add_generation_prompt=False)

    @functools.cached_property
    def vocabulary(self) -> Vocabulary:
        """The tokenizer's tokens as bytes."""
        return Vocabulary(self._tokenizer, int(self._text_config.vocab_size))

    @property
    def token_ids(self) -> range:
        """Ids of the tokens that the output layer has."""
        return range(int(self._text_config.vocab_size))

    def tokenize(self, text: str) -> np.ndarray:
        """Tokenize plain text, int64 [P]."""
        return self._format.tokenize(text)

    def grammar(self, options: ReplyOptions, tools: Sequence[ToolSpec]) -> str | None:
        """Return a grammar of the replies that satisfy the options; None if every reply does."""
        return reply_grammar(
            options, tools, lambda text: spell_marker(text, self._tokenizer, self.vocabulary)
        )

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
        return Prompts.from_observations(observations, self._text_config.vocab_size)

    def log_probs(
        self, batch: Prompts, tokens: Tensor, temperatures: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return log-probs and entropies of replies int64 [B, T], with `NO_TOKEN` beyond their
        ends; float32 [B, T] each.
        """
        tokens = tokens.cpu()
        ends = (tokens != NO_TOKEN).sum(dim=1).tolist()
        return self.score(batch, tokens, ends, temperatures)

    def score(
        self, batch: Prompts, tokens: Tensor, ends: Sequence[int], temperatures: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return what `log_probs` does, for replies whose lengths are known.

        Args:
            batch: prompts.
            tokens: int64 [B, T], on the host.
            ends: length of each reply.
            temperatures: float32 [B].
        """
        replies = [reply[:end] for reply, end in zip(tokens, ends, strict=True)]
        hidden, positions = self._read_replies(batch, replies)
        # Padding is not scored: one long reply would make the head read as much for all others.
        width = tokens.shape[1]
        offsets = [row * width + column for row, end in enumerate(ends) for column in range(end)]
        chosen = to_device(torch.tensor(offsets), self._device)
        scores = score_tokens(
            self._head,
            hidden[to_device(positions, self._device)],
            to_device(torch.cat(replies), self._device),
            to_device(temperatures, self._device)[chosen // width],
            mask_forbidden_tokens(replies, batch.grammars, self.vocabulary, device=self._device),
            vocab_size=int(self._text_config.vocab_size),
        )
        log_probs, entropies = (
            each.new_zeros(tokens.numel()).index_copy(0, chosen, each).view(tokens.shape)
            for each in scores
        )
        return log_probs, entropies

    @property
    def blocks(self) -> Sequence[nn.Module]:
        """The layers of the network, from the first to the last."""
        return list(self._trunk.layers)

    def tensor_plan(self) -> TensorPlan:
        """Return the layers that tensor parallelism cuts.

        Raises: ConfigError for another kind of network than `TENSOR_PLANS`.
        """
        kind = self._network.config.model_type
        if kind not in TENSOR_PLANS:
            raise no_tensor_plan_error(f"a language model of the kind {kind}")
        return decoder_plan(self._network, "model.layers", self._text_config)

    def key_value_bytes(self) -> int:
        """Return the bytes that the keys and values of one token take, in all layers."""
        each = next(self._network.parameters()).element_size()
        return count_token_bytes(self._text_config, each)

    def features(self, batch: Prompts) -> Tensor:
        """Return the hidden state of each prompt's last token, [B, feature_size]."""
        hidden, starts = self._read(batch, [torch.from_numpy(prompt) for prompt in batch.tokens])
        ends = starts + torch.tensor([len(prompt) for prompt in batch.tokens]) - 1
        return hidden[to_device(ends, self._device)]

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
        return self._extend(memory, slots, starts, tokens, self._next_inputs)

    def _extend(
        self,
        memory: SlotKeyValues,
        slots: Sequence[int],
        starts: Sequence[int],
        tokens: Sequence[Sequence[int]],
        inputs: Callable[[Tensor, Tensor], dict[str, Tensor]],
    ) -> Tensor:
        """Read more tokens; `inputs` returns the trunk's inputs for padded tokens and their
        positions in the slots, int64 [B, W] each, on the host.
        """
        with torch.inference_mode():
            hidden = extend_rows(self._trunk, memory, slots, starts, tokens, inputs, self._device)
            logits: Tensor = self._head(hidden).float()
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

    def _chat_format(self) -> ChatFormat:
        return ChatFormat(self._tokenizer, self._stop_tokens)

    @property
    def _trunk(self) -> Any:
        """The part of the network from embedded tokens to hidden states."""
        return self._network.base_model

    def _next_inputs(self, tokens: Tensor, positions: Tensor) -> dict[str, Tensor]:
        """Return the trunk's inputs for tokens that continue conversations, int64 [B, W] each."""
        return {
            "input_ids": to_device(tokens, self._device),
            "position_ids": to_device(positions, self._device),
        }

    def _row_inputs(
        self, batch: Prompts, rows: Sequence[Tensor], lines: Tensor, starts: Sequence[int]
    ) -> dict[str, Tensor]:
        """Return the trunk's inputs for whole rows.

        Args:
            batch: their prompts.
            rows: tokens of each row.
            lines: the same tokens on padded lines, or end to end on one; int64 [N, W], on the host.
            starts: position of each row's first token in the flattened lines.
        """
        inputs = {"input_ids": to_device(lines, self._device)}
        # Rows on one line count their positions anew; padded rows have those that the trunk makes
        # by itself.
        if len(lines) < len(rows):
            positions = torch.cat([torch.arange(len(row)) for row in rows])
            inputs["position_ids"] = to_device(positions[None], self._device)
        return inputs

    def _read(self, batch: Prompts, rows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return hidden states, [L, feature_size], and each row's offset in them, int64 [B]."""
        inputs = functools.partial(self._row_inputs, batch, rows)
        return read_rows(self._trunk, rows, inputs, self._device)

    def _read_replies(self, batch: Prompts, replies: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return hidden states, [L, feature_size], and the offset in them from which each token of
        each reply is chosen, int64 [N], end to end.
        """
        shared = (
            None if self.reads_images else share_prompts(batch.tokens, replies, self.feature_size)
        )
        if shared is not None:
            hidden: Tensor = self._trunk(
                **self._next_inputs(shared.tokens, shared.positions),
                attention_mask=shared.visible(self._device),
                use_cache=False,
            ).last_hidden_state.flatten(0, 1)
            return hidden, reply_offsets(shared.prompt_ends, shared.reply_starts, replies)
        prompts = [torch.from_numpy(prompt) for prompt in batch.tokens]
        rows = [torch.cat(pair) for pair in zip(prompts, replies, strict=True)]
        hidden, begins = self._read(batch, rows)
        starts = begins + torch.tensor([len(prompt) for prompt in prompts])
        return hidden, reply_offsets(starts - 1, starts, replies)

    def _head(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self._network.get_output_embeddings()(hidden)
        return logits

    @property
    def _device(self) -> torch.device:
        device: torch.device = next(self._network.parameters()).device
        return device


def chat_demonstration(
    policy: CausalLanguageModel, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()
) -> Demonstration:
    """Encode a whole conversation as one row, by the policy's own chat template; the loss covers
    every assistant message.

    Raises: ValueError if the conversation has no assistant message, or images that the policy does
    not read, or if the template renders a message differently when more messages follow.
    """
    assistant_turns = [
        number for number, message in enumerate(messages) if message.role == "assistant"
    ]
    if not assistant_turns:
        raise ValueError(
            "the conversation has no assistant message, expected at least one to train on."
        )
    tokens = policy.render_whole(messages[: assistant_turns[-1] + 1], tools)
    trained_tokens = np.zeros(len(tokens), np.bool_)
    for number in assistant_turns:
        before = policy.render(messages[:number], tools)
        start = len(before)
        # Templates that drop earlier thoughts render a turn differently later; a loss mask by
        # position would then cover the wrong tokens.
        if (tokens[:start] != before).any():
            raise ValueError(
                f"the chat template renders the first {number} messages differently when more "
                "follow, so no loss mask can be built."
            )
        # The token that ends the turn is trained too, or the policy would never stop.
        ends = np.flatnonzero(np.isin(tokens[start:], list(policy.stop_tokens)))
        trained_tokens[start : start + int(ends[0]) + 1 if len(ends) else len(tokens)] = True
    images, prompt = process_images(policy, tokens, messages[: assistant_turns[-1] + 1])
    starts = () if prompt is None else prompt.image_starts
    first, last = int(trained_tokens.argmax()), int(np.flatnonzero(trained_tokens)[-1]) + 1
    return Demonstration(
        observation=make_conversation_observation(tokens[:first], images, starts),
        actions=tokens[None, first:last],
        num_valid=1,
        trained_tokens=trained_tokens[first:last],
    )
