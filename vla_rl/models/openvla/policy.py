"""The OpenVLA policy: network, processor and action tokens behind the one interface of engines and
learners.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from vla_rl.algorithms import entropy
from vla_rl.engines.cuda_graphs import Tensors
from vla_rl.engines.device_lane import to_device
from vla_rl.engines.sampling import choose, sampling_columns, seeded_uniforms, tempered_log_probs
from vla_rl.errors import CheckpointError, ConfigError
from vla_rl.models.openvla.config import OpenVlaConfig
from vla_rl.models.openvla.network import OpenVlaNetwork
from vla_rl.models.prismatic.action_tokens import ActionTokenizer
from vla_rl.models.prismatic.checkpoint_format import FILES_SAY, CheckpointFormat, refuse_unused
from vla_rl.models.prismatic.config import LlmConfig, Normalization
from vla_rl.models.prismatic.dialects import conventions_of
from vla_rl.models.prismatic.folder import PublicFolder, open_folder
from vla_rl.models.prismatic.loading import load_folder, with_adapter
from vla_rl.models.prismatic.policy import PrismaticPolicy, require_chunks
from vla_rl.models.prismatic.processor import PrismaticBatch
from vla_rl.models.prismatic.public_config import (
    Extension,
    agreed,
    known_conventions,
    require_family,
    shared_config,
)
from vla_rl.models.prismatic.saving import checkpoint_files, read_tokenizer
from vla_rl.models.prismatic.statistics import bounds_of, choose_key, gripper_of
from vla_rl.types import Sampling


class OpenVla(PrismaticPolicy[OpenVlaConfig, OpenVlaNetwork]):
    """A `PolicyModel`: T = action_dim tokens for each decision (one control step), each sampled
    given the ones before it.

    Tokens are ids of the full vocabulary. Build one with `create` (random weights) or `load` (a
    public checkpoint).
    """

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
        return self._network.token_ids

    @staticmethod
    def build_network(config: OpenVlaConfig) -> OpenVlaNetwork:
        """Build a network with new weights, from the global random state."""
        return OpenVlaNetwork(config)

    @classmethod
    def load(
        cls,
        checkpoint: Path | str | PublicFolder,
        format: CheckpointFormat = FILES_SAY,
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
        config = config_of(folder, format)
        config = with_adapter(config, folder, format.adapter_use or "merge", OpenVlaNetwork)
        tokenizer = read_tokenizer(config)
        with torch.device("meta"):
            network = OpenVlaNetwork(config)
        load_folder(network, folder, dtype=format.torch_dtype, device=device)
        return cls(config, network, tokenizer, folder)

    def sample(self, batch: PrismaticBatch, samplings: Sequence[Sampling]) -> tuple[Tensor, Tensor]:
        """Sample token ids int64 [B, D]; return them and their log-probs float32 [B, D]. Greedy
        rows take the most likely token each time.
        """
        for sampling in samplings:
            sampling.require_no_mean()
        noise = to_device(seeded_uniforms(samplings, self.config.action_dim), self._device)
        tokens, log_probs = self._acting(
            self._generated, batch, *sampling_columns(samplings, self._device), noise
        )
        return tokens, log_probs

    def log_probs(
        self, batch: PrismaticBatch, tokens: Tensor, temperatures: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return log-probs and entropies of the given token ids, float32 [B, D] each, over the
        tokens of `vocabulary`.
        """
        tokens, temperatures = (to_device(given, self._device) for given in (tokens, temperatures))
        log_probs = tempered_log_probs(self._network(batch, tokens), temperatures)
        index = tokens - self._network.first_id
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
            pictures=self.config.pictures,
            rope_inv_freq_dtype=self.config.llm.rope_inv_freq_dtype,
            featurizer_overrides=self.config.featurizer.overrides,
            fused_featurizer_overrides=self.config.fused_featurizer.overrides,
        )
        return checkpoint_files(self.config, extension, self._tokenizer, self._origin)

    def _generated(
        self, batch: PrismaticBatch, temperatures: Tensor, is_greedy: Tensor, noise: Tensor
    ) -> Tensors:
        decoding, first_id = self._network.begin(batch), self._network.first_id
        chosen: list[Tensor] = []
        log_probs: list[Tensor] = []
        for position in range(self.config.action_dim):
            index, log_prob = choose(
                decoding.logits, temperatures, is_greedy, noise[:, position : position + 1]
            )
            chosen.append(index + first_id)
            log_probs.append(log_prob)
            if position + 1 < self.config.action_dim:
                decoding.tell(chosen[-1][:, 0])
        return torch.cat(chosen, dim=1), torch.cat(log_probs, dim=1)


def config_of(folder: PublicFolder, format: CheckpointFormat) -> OpenVlaConfig:
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
    if beside := sorted(
        path.name for place in folder.folders for path in place.glob("*checkpoint*.pt")
    ):
        raise CheckpointError(
            f"{folder.path} has {', '.join(beside)} beside its weights, as OpenVLA-OFT's "
            "checkpoints do; load it with OpenVlaOft or ContinuousOpenVlaOft."
        )
    key = choose_key(folder.statistics, format.norm_key or extension.norm_key, folder.path)
    statistics = folder.statistics[key]
    scale: Normalization = agreed(
        folder.path, "normalization", extension.normalization, format.normalization, "bounds_q99"
    )
    shared = shared_config(folder.public, extension, folder.tokenizer_file, folder.pixels)
    llm: LlmConfig = shared.pop("llm")
    conventions = conventions_of(
        folder.path, known_conventions(extension), format.dialect, without=("has_stop_token",)
    )
    gripper = gripper_of(statistics, extension)
    return OpenVlaConfig(
        **shared,
        llm=msgspec.structs.replace(llm, rope_inv_freq_dtype=conventions.rope_inv_freq_dtype),
        images=conventions.images,
        cameras=format.cameras or extension.cameras or ("image",),
        action_bounds=bounds_of(statistics, scale, gripper=gripper, epsilon=conventions.epsilon),
        norm_key=key,
        normalization=scale,
        vocabulary=format.vocabulary or conventions.vocabulary,
    )
