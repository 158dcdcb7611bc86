"""The OpenVLA-OFT policy: network, processor and action tokens behind the one interface of engines and learners."""

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from vla_rl.algorithms import entropy
from vla_rl.engines.policy_model import PolicyModel
from vla_rl.engines.sampling import choose_tokens, tempered_log_probs
from vla_rl.models.openvla_oft import checkpoint
from vla_rl.models.openvla_oft.config import Dialect, OpenVlaOftConfig
from vla_rl.models.openvla_oft.network import OpenVlaOftNetwork
from vla_rl.models.prismatic.action_tokens import ActionTokenizer
from vla_rl.models.prismatic.config import LoraConfig
from vla_rl.models.prismatic.folder import PublicFolder, open_folder
from vla_rl.models.prismatic.lora import merged_tensors, with_weights
from vla_rl.models.prismatic.processor import PrismaticBatch, PrismaticProcessor
from vla_rl.models.prismatic.saving import read_tokenizer
from vla_rl.models.prismatic.statistics import Normalization
from vla_rl.types import Observation, Sampling


class OpenVlaOft(PolicyModel[PrismaticBatch]):
    """A `PolicyModel`: T = chunk_size * action_dim tokens a decision, sampled independently of each other.

    Tokens are ids of the whole vocabulary, as the public checkpoints count them. Build one with `create` (random weights)
    or `load` (a public checkpoint). Continuous heads are `ContinuousOpenVlaOft`.
    """

    def __init__(
        self,
        config: OpenVlaOftConfig,
        network: OpenVlaOftNetwork,
        tokenizer: Tokenizer,
        origin: PublicFolder | None = None,
    ) -> None:
        config.require(config.head == "tokens", "head", "tokens here; ContinuousOpenVlaOft is for the others")
        self.config = config
        self._network, self._tokenizer, self._origin = network.eval(), tokenizer, origin
        self._processor = PrismaticProcessor(config, tokenizer, config.proprio)
        self._action_tokenizer = ActionTokenizer(config.llm.vocab_size, config.num_bins, config.action_bounds)

    @classmethod
    def create(cls, config: OpenVlaOftConfig, seed: int) -> "OpenVlaOft":
        """Random weights from `seed`; the global random state stays as it was."""
        tokenizer = read_tokenizer(config.tokenizer_file)
        return cls(config, checkpoint.random_network(config, seed), tokenizer)

    @classmethod
    def load(
        cls,
        folder: Path | str,
        *,
        norm_key: str | None = None,
        normalization: Normalization = "bounds_q99",
        dialect: Dialect = "openvla_oft",
        cameras: tuple[str, ...] | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
    ) -> "OpenVlaOft":
        """Read a checkpoint in the public layout, shard by shard, without holding it twice.

        Args:
            folder: a folder, or a hub id such as `Haozhan72/Openvla-oft-SFT-libero-goal-traj1`.
            norm_key: which of its action statistics; may be left out where there is one set, or one was chosen before.
            normalization: which of the statistics' numbers bound the action.
            dialect: whose conventions it was trained with; a checkpoint saved here knows its own.
            cameras: observation keys of its images; None for the checkpoint's own, else the fixed camera alone.
            dtype: of the parameters; None takes the files'.
            device: where the parameters go.

        Raises: CheckpointError saying what is missing, unknown or damaged, or how much memory is lacking.
        """
        origin = open_folder(folder)
        config = checkpoint.config_of(origin, norm_key, normalization, dialect, cameras, head="tokens")
        network = checkpoint.load_network(config, origin, dtype, device)
        return cls(config, network, read_tokenizer(config.tokenizer_file), origin)

    def save(self, folder: Path) -> None:
        """Write the same layout to a new folder, all of it or nothing. Raises: CheckpointError."""
        checkpoint.save(folder, self.checkpoint_tensors(), self.checkpoint_files(), self._origin)

    def copy(self) -> "OpenVlaOft":
        """The same policy with weights of its own."""
        return OpenVlaOft(self.config, copy.deepcopy(self._network), self._tokenizer, self._origin)

    def adapted(self, lora: LoraConfig, seed: int) -> "OpenVlaOft":
        """The same policy, whose adapters are trained in place of its weights; it acts as before at first."""
        config = msgspec.structs.replace(self.config, lora=lora)
        network = with_weights(lambda: OpenVlaOftNetwork(config), self._network.state_dict(), seed)
        return OpenVlaOft(config, network, self._tokenizer, self._origin)

    def merged(self) -> "OpenVlaOft":
        """The same policy with its adapters merged into the weights, to be saved for whoever knows no adapters."""
        config = msgspec.structs.replace(self.config, lora=None)
        network = with_weights(lambda: OpenVlaOftNetwork(config), merged_tensors(self._network), seed=0)
        return OpenVlaOft(config, network, self._tokenizer, self._origin)

    @property
    def network(self) -> OpenVlaOftNetwork:
        """The parameters."""
        return self._network

    @property
    def tokenizer(self) -> Tokenizer:
        """Makes ids of prompts."""
        return self._tokenizer

    def prepare(self, observations: Sequence[Observation]) -> PrismaticBatch:
        """One row for each observation, on the network's device."""
        return self._processor.prepare(observations, self._device)

    def sample(self, batch: PrismaticBatch, samplings: Sequence[Sampling]) -> tuple[Tensor, Tensor]:
        """Token ids int64 [B, T] and their log-probs float32 [B, T]."""
        chosen, log_probs = choose_tokens(self._network(batch), samplings)
        return chosen + self._action_tokenizer.first_id, log_probs

    def log_probs(self, batch: PrismaticBatch, tokens: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies of given token ids, float32 [B, T] each, over the action tokens only."""
        logits = self._network(batch)
        index = tokens.to(self._device) - self._action_tokenizer.first_id
        log_probs = tempered_log_probs(logits, temperatures.to(self._device))
        # log_probs are logits too: their softmax is the same distribution
        return log_probs.gather(-1, index[..., None])[..., 0], entropy(log_probs)

    @property
    def feature_size(self) -> int:
        """Width of the language model."""
        return self.config.llm.hidden_size

    def features(self, batch: PrismaticBatch) -> Tensor:
        """The trunk's output, averaged over the places where action tokens are read, [B, feature_size]."""
        return self._network.read(batch).mean(dim=1)

    def encode(self, actions: np.ndarray) -> np.ndarray:
        """float32 [B, H, D] to int64 [B, T], step by step and dimension by dimension."""
        expected = (self.config.chunk_size, self.config.action_dim)
        if actions.ndim != 3 or actions.shape[1:] != expected:
            raise ValueError(f"actions are {list(actions.shape)}, expected [B, {expected[0]}, {expected[1]}].")
        return self._action_tokenizer.encode(actions).reshape(len(actions), -1)

    def decode(self, tokens: np.ndarray) -> np.ndarray:
        """int64 [B, T] to float32 [B, H, D], in the environment's units."""
        grid = tokens.reshape(len(tokens), self.config.chunk_size, self.config.action_dim)
        return self._action_tokenizer.decode(grid)

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """Parameters under their public names; views, not copies."""
        return checkpoint.public_tensors(self._network)

    def checkpoint_files(self) -> Mapping[str, bytes]:
        """`config.json`, `tokenizer.json`, `vla_rl.json`, and what else a loaded folder held."""
        return checkpoint.files_of(self.config, self._tokenizer, self._origin)

    def load_checkpoint_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy tensors with public names into the network; every name and shape has to fit."""
        checkpoint.copy_tensors(self._network, tensors)

    @property
    def _device(self) -> torch.device:
        return next(self._network.parameters()).device
