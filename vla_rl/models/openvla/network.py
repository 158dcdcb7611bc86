"""OpenVLA's network: a causal Llama behind two vision towers (Kim et al. 2024, arXiv:2406.09246).

    position  0     1 .. V     V + 1 .. V + P - 1     then the action tokens, one after the other
    token     BOS   patches    prompt without BOS     id, id, ...

The prompt ends with the bare space token. The first action token is read from it, and each next one
from the token before. Padding stands last, so each row has the same positions as it would have
alone, and causal attention needs no mask to skip it.
"""

import torch
from torch import Tensor
from transformers import DynamicCache

from vla_rl.models.openvla.config import OpenVlaConfig
from vla_rl.models.prismatic.lora import add_adapters
from vla_rl.models.prismatic.network import PrismaticNetwork
from vla_rl.models.prismatic.processor import PrismaticBatch
from vla_rl.models.prismatic.sequence import consecutive, gather_rows, insert_tail, is_token


class OpenVlaNetwork(PrismaticNetwork):
    """Network from a batch of observations to logits of action tokens, teacher-forced or one step
    at a time.
    """

    def __init__(self, config: OpenVlaConfig) -> None:
        super().__init__(config, is_causal=True)
        self._num_action_tokens, self._pad_id = config.action_dim, config.llm.pad_token_id
        first_action_id = config.llm.vocab_size - config.num_bins
        # padding ids beyond the vocabulary are not tokens, but the reference gives them
        # probability: they stay in `all`
        self._head_rows = (
            slice(0, config.llm.table_size)
            if config.vocabulary == "all"
            else slice(first_action_id, config.llm.vocab_size)
        )
        if config.lora is not None:
            add_adapters(self, config.lora)

    @property
    def first_id(self) -> int:
        """Token id of the first logit."""
        return self._head_rows.start

    @property
    def token_ids(self) -> range:
        """Token ids of the logits."""
        return range(self._head_rows.start, self._head_rows.stop)

    def forward(self, batch: PrismaticBatch, tokens: Tensor) -> Tensor:
        """Return the logits of each action token given the ones before it: [B, D, V], by ascending
        token id from `first_id`.

        Args:
            batch: observations, on this network's device.
            tokens: int64 [B, D], the action tokens; the last one is not read.
        """
        text = insert_tail(batch.prompts, batch.prompt_lengths, tokens[:, :-1], self._pad_id)
        sequence, num_patches = self._embedded(batch, text)
        read = consecutive(batch.prompt_lengths + num_patches - 1, self._num_action_tokens)
        output = self.language_model.model(inputs_embeds=sequence, use_cache=False, read=read)
        return self._logits(output.last_hidden_state)

    def begin(self, batch: PrismaticBatch) -> "Decoding":
        """Read the observations once; the returned `Decoding` then generates token after token."""
        sequence, num_patches = self._embedded(batch, batch.prompts)
        lengths = batch.prompt_lengths + num_patches
        cache = DynamicCache()
        output = self.language_model.model(
            inputs_embeds=sequence, past_key_values=cache, use_cache=True
        )
        # later tokens stand behind the padding, and are the first that could see it
        mask = is_token(lengths, sequence.shape[1]) if batch.is_padded else None
        logits = self._logits(gather_rows(output.last_hidden_state, lengths[:, None] - 1))
        return Decoding(self, cache, mask, lengths, logits)

    def read_prompt(self, batch: PrismaticBatch) -> Tensor:
        """Return the trunk's output at the position where the first action token is read, [B,
        hidden_size].
        """
        sequence, num_patches = self._embedded(batch, batch.prompts)
        read = (batch.prompt_lengths + num_patches)[:, None] - 1
        output = self.language_model.model(inputs_embeds=sequence, use_cache=False, read=read)
        last: Tensor = output.last_hidden_state[:, 0]
        return last

    def _embedded(self, batch: PrismaticBatch, text: Tensor) -> tuple[Tensor, int]:
        patches = self.projector(self.vision_backbone(batch.images))
        words = self.language_model.get_input_embeddings()(text)
        return torch.cat([words[:, :1], patches, words[:, 1:]], dim=1), patches.shape[1]

    def _logits(self, hidden: Tensor) -> Tensor:
        return self.head_logits(hidden, self._head_rows)


class Decoding:
    """The state between two tokens of a batch: keys and values, and the logits of the next token.

    Attributes: `logits`, [B, 1, V].
    """

    def __init__(
        self,
        network: OpenVlaNetwork,
        cache: DynamicCache,
        mask: Tensor | None,
        positions: Tensor,
        logits: Tensor,
    ) -> None:
        self._network, self._cache, self._mask, self._positions = network, cache, mask, positions
        self.logits = logits

    def tell(self, tokens: Tensor) -> None:
        """Append the chosen token ids, int64 [B], and compute the next logits."""
        network = self._network
        embedded = network.language_model.get_input_embeddings()(tokens[:, None])
        if self._mask is not None:
            self._mask = torch.cat([self._mask, self._mask.new_ones(len(tokens), 1)], dim=1)
        output = network.language_model.model(
            inputs_embeds=embedded,
            attention_mask=self._mask,
            position_ids=self._positions[:, None],
            past_key_values=self._cache,
            use_cache=True,
        )
        self._positions = self._positions + 1
        self.logits = network._logits(output.last_hidden_state)
