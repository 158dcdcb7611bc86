"""The OpenVLA-OFT policy: network, processor and action tokens behind the one interface of engines and learners."""

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from vla_rl.algorithms import entropy
from vla_rl.engines.policy_model import PolicyModel
from vla_rl.engines.sampling import choose_tokens, tempered_log_probs
from vla_rl.errors import ConfigError
from vla_rl.models.openvla_oft import layout
from vla_rl.models.openvla_oft.action_tokens import ActionTokenizer
from vla_rl.models.openvla_oft.config import OpenVlaOftConfig
from vla_rl.models.openvla_oft.network import OpenVlaOftNetwork
from vla_rl.models.openvla_oft.processor import OpenVlaOftBatch, OpenVlaOftProcessor
from vla_rl.types import Observation, Sampling


class OpenVlaOft(PolicyModel[OpenVlaOftBatch]):
    """A `PolicyModel`: T = chunk_size * action_dim tokens a decision, sampled independently of each other.

    Tokens are ids of the whole vocabulary, as the public checkpoints count them. Build one with `create` (random weights)
    or `load` (a folder in the public layout).
    """

    def __init__(self, config: OpenVlaOftConfig, network: OpenVlaOftNetwork, tokenizer: Tokenizer) -> None:
        self.config = config
        self._network, self._tokenizer = network.eval(), tokenizer
        self._processor = OpenVlaOftProcessor(config, tokenizer)
        self._action_tokenizer = ActionTokenizer(config.llm.vocab_size, config.num_bins, config.action_bounds)

    @classmethod
    def create(cls, config: OpenVlaOftConfig, seed: int) -> "OpenVlaOft":
        """Random weights from `seed`; the global random state stays as it was."""
        try:
            tokenizer = Tokenizer.from_file(config.tokenizer_file)
        except Exception as error:  # the tokenizers library raises nothing narrower
            raise ConfigError(
                f"OpenVlaOftConfig.tokenizer_file is {config.tokenizer_file!r}, expected a tokenizer.json: {error}"
            ) from error
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            network = OpenVlaOftNetwork(config)
        return cls(config, network, tokenizer)

    @classmethod
    def load(cls, folder: Path) -> "OpenVlaOft":
        """Read a checkpoint in the public layout. Raises: CheckpointError saying what is missing, unknown or damaged."""
        config = layout.read_config(folder)
        model = cls.create(config, seed=0)
        model.load_checkpoint_tensors(layout.read_tensors(folder))
        return model

    def save(self, folder: Path) -> None:
        """Write the same layout to a new folder, all of it or nothing. Raises: CheckpointError."""
        layout.write_folder(folder, self.checkpoint_tensors(), self.checkpoint_files())

    def copy(self) -> "OpenVlaOft":
        """The same policy with weights of its own."""
        return OpenVlaOft(self.config, copy.deepcopy(self._network), self._tokenizer)

    @property
    def network(self) -> OpenVlaOftNetwork:
        """The parameters."""
        return self._network

    def prepare(self, observations: Sequence[Observation]) -> OpenVlaOftBatch:
        """One row for each observation, on the CPU."""
        return self._processor.prepare(observations)

    def sample(self, batch: OpenVlaOftBatch, samplings: Sequence[Sampling]) -> tuple[Tensor, Tensor]:
        """Token ids int64 [B, T] and their log-probs float32 [B, T]."""
        chosen, log_probs = choose_tokens(self._network(batch.to(self._device)), samplings)
        return chosen + self._action_tokenizer.first_id, log_probs

    def log_probs(self, batch: OpenVlaOftBatch, tokens: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies of given token ids, float32 [B, T] each, over the action tokens only."""
        logits = self._network(batch.to(self._device))
        index = tokens.to(self._device) - self._action_tokenizer.first_id
        log_probs = tempered_log_probs(logits, temperatures.to(self._device))
        # log_probs are logits too: their softmax is the same distribution
        return log_probs.gather(-1, index[..., None])[..., 0], entropy(log_probs)

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
        return {layout.public_name(name): tensor for name, tensor in self._network.state_dict().items()}

    def checkpoint_files(self) -> Mapping[str, bytes]:
        """`config.json` and `tokenizer.json`."""
        return {
            layout.CONFIG_FILE: layout.encode_config(self.config),
            layout.TOKENIZER_FILE: self._tokenizer.to_str(pretty=True).encode(),
        }

    def load_checkpoint_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy tensors with public names into the network; every name and shape has to fit."""
        layout.check_names(self.checkpoint_tensors(), tensors)
        self._network.load_state_dict({layout.timm_name(name): tensor for name, tensor in tensors.items()})

    @property
    def _device(self) -> torch.device:
        return next(self._network.parameters()).device
