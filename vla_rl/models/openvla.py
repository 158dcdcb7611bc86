"""OpenVLA: a causal Llama behind two vision towers generates one action token after the other (Kim et
al. 2024, arXiv:2406.09246).

    position  0     1 .. V     V + 1 .. V + P - 1     then the action tokens, one after the other
    token     BOS   patches    prompt without BOS     id, id, ...

The prompt ends with the bare space token. The first action token is read from it, and each next one
from the token before. Padding stands last, so each row has the same positions as it would have
alone, and causal attention needs no mask to skip it.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import DynamicCache

from vla_rl.algorithms import entropy
from vla_rl.engines.cuda_graphs import Tensors
from vla_rl.engines.device_lane import to_device
from vla_rl.engines.policy_model import SampledTokens
from vla_rl.engines.sampling import choose, sampling_columns, seeded_uniforms, tempered_log_probs
from vla_rl.errors import CheckpointError, ConfigError
from vla_rl.models.prismatic.action_tokens import ActionTokenizer, require_chunks
from vla_rl.models.prismatic.adapters import add_adapters
from vla_rl.models.prismatic.config import OpenVlaConfig
from vla_rl.models.prismatic.conventions import (
    AS_STORED,
    CheckpointFormat,
    refuse_unused,
)
from vla_rl.models.prismatic.folder import PublicFolder, open_folder, resolve_fields
from vla_rl.models.prismatic.network import PrismaticNetwork
from vla_rl.models.prismatic.policy import PrismaticPolicy, checkpoint_files
from vla_rl.models.prismatic.processor import PrismaticBatch, read_tokenizer
from vla_rl.models.prismatic.public_config import (
    Extension,
    require_family,
)
from vla_rl.models.prismatic.statistics import get_action_bounds, get_gripper
from vla_rl.models.prismatic.trunk import (
    consecutive_positions,
    gather_rows,
    insert_tail,
    token_mask,
)
from vla_rl.models.prismatic.weights import load_folder, with_adapter
from vla_rl.types import Sampling
from vla_rl.util.foreign_data import find_files


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
    def first_logit_id(self) -> int:
        """Token id of the first logit."""
        return self._head_rows.start

    @property
    def output_token_ids(self) -> range:
        """Token ids of the logits."""
        return range(self._head_rows.start, self._head_rows.stop)

    def forward(self, batch: PrismaticBatch, tokens: Tensor) -> Tensor:
        """Return the logits of each action token given the ones before it: [B, D, V], by ascending
        token id from `first_logit_id`.

        Args:
            batch: observations, on this network's device.
            tokens: int64 [B, D], the action tokens; the last one is not read.
        """
        text = insert_tail(batch.prompts, batch.prompt_lengths, tokens[:, :-1], self._pad_id)
        sequence, num_patches = self._embedded(batch, text)
        read = consecutive_positions(
            batch.prompt_lengths + num_patches - 1, self._num_action_tokens
        )
        output = self.language_model.model(inputs_embeds=sequence, use_cache=False, read=read)
        return self._logits(output.last_hidden_state)

    def start_decoding(self, batch: PrismaticBatch) -> "Decoding":
        """Read the observations once; the returned `Decoding` then generates token after token."""
        sequence, num_patches = self._embedded(batch, batch.prompts)
        lengths = batch.prompt_lengths + num_patches
        # Keys and values are kept, because the 256 patches are the same for all tokens of a
        # decision.
        cache = DynamicCache()
        output = self.language_model.model(
            inputs_embeds=sequence, past_key_values=cache, use_cache=True
        )
        # later tokens stand behind the padding, and are the first that could see it
        mask = token_mask(lengths, sequence.shape[1]) if batch.is_padded else None
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
        embeddings = self.language_model.get_input_embeddings()(text)
        return torch.cat([embeddings[:, :1], patches, embeddings[:, 1:]], dim=1), patches.shape[1]

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

    def append_tokens(self, tokens: Tensor) -> None:
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


class OpenVla(PrismaticPolicy[OpenVlaConfig, OpenVlaNetwork]):
    """A `PolicyModel`: T = action_dim tokens for each decision (one control step), each sampled
    given the ones before it.

    Tokens are ids of the full vocabulary. Build one with `create` (random weights) or `load` (a
    public checkpoint).
    """

    vllm_form = "vla_rl.models.vllm.served_prismatic:serve_prismatic"
    """Function that returns the form that vLLM engines serve."""

    def __init__(
        self,
        config: OpenVlaConfig,
        network: OpenVlaNetwork,
        tokenizer: Tokenizer,
        origin: PublicFolder | None = None,
    ) -> None:
        super().__init__(config, network, tokenizer, origin)
        self._action_tokenizer = ActionTokenizer(
            config.llm.vocab_size, config.num_bins, config.action_bounds
        )

    @property
    def token_ids(self) -> range:
        """Ids of the tokens that it samples from."""
        return self._network.output_token_ids

    @staticmethod
    def build_network(config: OpenVlaConfig) -> OpenVlaNetwork:
        """Build a network with new weights, from the global random state."""
        return OpenVlaNetwork(config)

    @classmethod
    def load(
        cls,
        checkpoint: Path | str | PublicFolder,
        format: CheckpointFormat = AS_STORED,
        *,
        camera: str | None = None,
        device: torch.device | str = "cpu",
        **fields: Any,
    ) -> "OpenVla":
        """Read a checkpoint in the public layout, shard by shard, never twice in memory.

        Args:
            checkpoint: a folder, read already or not, or a hub id such as
                `openvla/openvla-7b-finetuned-libero-goal`.
            format: settings that the files leave out.
            camera: observation key of its image; None for the checkpoint's own, else `image`.
            device: device of the parameters.
            fields: fields of `format`, such as `norm_key="libero_goal"`.

        Raises: CheckpointError naming what is missing, unknown or damaged, or how much memory is
        lacking.
        """
        format = format.changed(**fields)
        if camera is not None:
            format = format.changed(cameras=(camera,))
        folder = open_folder(checkpoint, format.adapter)
        config = read_config(folder, format)
        config = with_adapter(config, folder, format.adapter_use or "merge", OpenVlaNetwork)
        tokenizer = read_tokenizer(config)
        with torch.device("meta"):
            network = OpenVlaNetwork(config)
        load_folder(network, folder, dtype=format.torch_dtype, device=device)
        return cls(config, network, tokenizer, folder)

    def sample(self, batch: PrismaticBatch, samplings: Sequence[Sampling]) -> SampledTokens:
        """Sample token ids int64 [B, D]. Greedy rows take the most likely token each time."""
        noise = to_device(seeded_uniforms(samplings, self.config.action_dim), self._device)
        tokens, log_probs = self._acting(
            self._generated, batch, *sampling_columns(samplings, self._device), noise
        )
        return SampledTokens(tokens, log_probs)

    def log_probs(
        self, batch: PrismaticBatch, tokens: Tensor, temperatures: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return log-probs and entropies of the given token ids, float32 [B, D] each, over the
        tokens of `vocabulary`.
        """
        tokens, temperatures = (to_device(given, self._device) for given in (tokens, temperatures))
        log_probs = tempered_log_probs(self._network(batch, tokens), temperatures)
        # Tokens are ids of the whole vocabulary in trajectories and on the wire; the head's
        # logits may begin later.
        index = tokens - self._network.first_logit_id
        return log_probs.gather(-1, index[..., None])[..., 0], entropy(log_probs)

    def features(self, batch: PrismaticBatch) -> Tensor:
        """Return the trunk's output at the end of the prompt, [B, feature_size]."""
        return self._network.read_prompt(batch)

    def encode(self, actions: np.ndarray) -> np.ndarray:
        """Map actions float32 [B, 1, D] to token ids int64 [B, D]."""
        require_chunks(actions, self.config.chunk_size, self.config.action_dim)
        return self._action_tokenizer.encode(actions)[:, 0]

    def decode(self, tokens: np.ndarray) -> np.ndarray:
        """Map token ids int64 [B, D] to actions float32 [B, 1, D], in the environment's units; any
        other id takes the nearest bin.
        """
        return self._action_tokenizer.decode(tokens)[:, None]

    def checkpoint_files(self) -> Mapping[str, bytes]:
        """Return `config.json`, the tokenizer, and the other small files of a loaded folder."""
        extension = Extension(
            family="openvla",
            norm_key=self.config.norm_key,
            cameras=self.config.cameras,
            images=self.config.images,
            normalization=self.config.normalization,
            gripper=self.config.action_bounds.gripper,
            epsilon=self.config.action_bounds.epsilon,
            vocabulary=self.config.vocabulary,
            lora=self.config.lora,
            training_images=self.config.training_images,
            rope_inv_freq_dtype=self.config.llm.rope_inv_freq_dtype,
            featurizer_overrides=self.config.featurizer.overrides,
            fused_featurizer_overrides=self.config.fused_featurizer.overrides,
        )
        return checkpoint_files(self.config, extension, self._tokenizer, self._origin)

    def _generated(
        self, batch: PrismaticBatch, temperatures: Tensor, is_greedy: Tensor, noise: Tensor
    ) -> Tensors:
        decoding, first_logit_id = self._network.start_decoding(batch), self._network.first_logit_id
        chosen: list[Tensor] = []
        log_probs: list[Tensor] = []
        # The noise of each position was drawn from the row's own seed, so a decision does not
        # depend on the batch it is in.
        for position in range(self.config.action_dim):
            index, log_prob = choose(
                decoding.logits, temperatures, is_greedy, noise[:, position : position + 1]
            )
            chosen.append(index + first_logit_id)
            log_probs.append(log_prob)
            if position + 1 < self.config.action_dim:
                decoding.append_tokens(chosen[-1][:, 0])
        return torch.cat(chosen, dim=1), torch.cat(log_probs, dim=1)


def read_config(folder: PublicFolder, format: CheckpointFormat) -> OpenVlaConfig:
    """Return the configuration of a checkpoint folder.

    Raises: CheckpointError if it holds another family, or lacks the statistics; ConfigError for a
    setting that OpenVLA does not have.
    """
    refuse_unused("openvla", chunk_size=format.chunk_size, head=format.head)
    if format.cameras is not None and len(format.cameras) != 1:
        raise ConfigError(
            f"cameras is {format.cameras!r}, expected one camera: OpenVLA was trained on one image"
        )
    extension = folder.extension
    require_family(folder.path, extension, "openvla")
    if other_files := sorted(
        path.name for each in folder.folders for path in find_files(each, "*checkpoint*.pt")
    ):
        raise CheckpointError(
            f"{folder.path} has {', '.join(other_files)} beside its weights, as OpenVLA-OFT's "
            "checkpoints do; load it with OpenVlaOft or ContinuousOpenVlaOft."
        )
    fields, conventions = resolve_fields(folder, format, without=("has_stop_token",))
    statistics = folder.statistics[fields["norm_key"]]
    return OpenVlaConfig(
        **fields,
        cameras=format.cameras or extension.cameras or ("image",),
        action_bounds=get_action_bounds(
            statistics,
            fields["normalization"],
            gripper=get_gripper(statistics, extension),
            epsilon=conventions.epsilon,
        ),
        vocabulary=format.vocabulary or conventions.vocabulary,
    )
