"""The OpenVLA-OFT policy: network, processor and action tokens behind the one interface of engines
and learners.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from vla_rl.algorithms import entropy
from vla_rl.engines.cuda_graphs import Tensors
from vla_rl.engines.device_lane import to_device
from vla_rl.engines.sampling import choose_tokens, tempered_log_probs
from vla_rl.models.openvla_oft import checkpoint
from vla_rl.models.openvla_oft.config import NewPart, OpenVlaOftConfig
from vla_rl.models.openvla_oft.network import OpenVlaOftNetwork
from vla_rl.models.openvla_oft.oft_policy import OftPolicy
from vla_rl.models.prismatic.action_tokens import ActionTokenizer
from vla_rl.models.prismatic.checkpoint_format import FILES_SAY, CheckpointFormat, refuse_unused
from vla_rl.models.prismatic.folder import PublicFolder, open_folder
from vla_rl.models.prismatic.policy import require_chunks
from vla_rl.models.prismatic.processor import PrismaticBatch, distinct
from vla_rl.models.prismatic.saving import read_tokenizer
from vla_rl.types import Observation, Sampling


class OpenVlaOft(OftPolicy):
    """A `PolicyModel`: T = chunk_size * action_dim tokens for each decision, sampled independently
    of each other.

    Tokens are ids of the full vocabulary, as in the public checkpoints. Build one with `create`
    (random weights) or `load` (a public checkpoint). Continuous heads are `ContinuousOpenVlaOft`.
    """

    def __init__(
        self,
        config: OpenVlaOftConfig,
        network: OpenVlaOftNetwork,
        tokenizer: Tokenizer,
        origin: PublicFolder | None = None,
    ) -> None:
        config.require(
            config.head == "tokens", "head", "tokens here; ContinuousOpenVlaOft is for the others"
        )
        super().__init__(config, network, tokenizer, origin)
        self._action_tokenizer = ActionTokenizer(
            config.llm.vocab_size, config.num_bins, config.action_bounds
        )

    @property
    def token_ids(self) -> range:
        """Ids of the action tokens."""
        first = self._action_tokenizer.first_id
        return range(first, first + self.config.num_bins)

    @classmethod
    def load(
        cls,
        folder: Path | str | PublicFolder,
        format: CheckpointFormat = FILES_SAY,
        *,
        new_parts: Collection[NewPart] = (),
        seed: int = 0,
        device: torch.device | str = "cpu",
        **fields: Any,
    ) -> "OpenVlaOft":
        """Read a checkpoint in the public layout, shard by shard, never twice in memory.

        Args:
            folder: a folder, read already or not, or a hub id such as
                `Haozhan72/Openvla-oft-SFT-libero-goal-traj1`.
            format: settings that the files leave out. With an adapter, parts beside it replace the
                checkpoint's.
            new_parts: parts that it lacks and that fine-tuning is to add, such as
                `proprio_projector`.
            seed: seed of the new parts' weights.
            device: device of the parameters.
            fields: fields of `format`, such as `norm_key="libero_goal"`.

        Raises: CheckpointError naming what is missing, unknown or damaged, or how much memory is
        lacking.
        """
        format = format.changed(**fields)
        refuse_unused("openvla_oft", head=format.head)
        origin = open_folder(folder, format.adapter)
        config = checkpoint.config_of(origin, "tokens", format, new_parts)
        tokenizer = read_tokenizer(config)
        dtype = format.torch_dtype
        network = checkpoint.load_network(config, origin, dtype, device, new_parts, seed)
        return cls(config, network, tokenizer, origin)

    def prepare(self, observations: Sequence[Observation]) -> PrismaticBatch:
        """Prepare the observations, on the network's device; if at most half of them differ, only
        those, and the row of each.

        The members of a group that decides once, such as on a driving scene, share one observation:
        the network sees it once, whatever their number.
        """
        proprio = () if self.config.proprio is None else (self.config.proprio.key,)
        small = ("instruction", *proprio)
        # the state of a robot tells most observations apart, before any picture is read
        for keys in (small, (*self.config.cameras, *small)):
            chosen, rows = distinct(observations, keys)
            if 2 * len(chosen) > len(observations):
                return super().prepare(observations)
        return replace(super().prepare(chosen), rows=to_device(torch.tensor(rows), self._device))

    def sample(self, batch: PrismaticBatch, samplings: Sequence[Sampling]) -> tuple[Tensor, Tensor]:
        """Sample token ids int64 [B, T]; return them and their log-probs float32 [B, T]."""
        (logits,) = self._acting(self._logits, batch)
        chosen, log_probs = choose_tokens(batch.spread(logits), samplings)
        return chosen + self._action_tokenizer.first_id, log_probs

    def log_probs(
        self, batch: PrismaticBatch, tokens: Tensor, temperatures: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return log-probs and entropies of the given token ids, float32 [B, T] each, over the
        action tokens only.
        """
        logits = batch.spread(self._network(batch))
        index = to_device(tokens, self._device) - self._action_tokenizer.first_id
        log_probs = tempered_log_probs(logits, to_device(temperatures, self._device))
        # log_probs are logits too: their softmax is the same distribution
        return log_probs.gather(-1, index[..., None])[..., 0], entropy(log_probs)

    def near_log_probs(self, batch: PrismaticBatch, tokens: Tensor, width: float) -> Tensor:
        """Return the mean log-prob of the bins around each given token id, float32 [B, T], weighed
        by a Gaussian whose standard deviation is `width` bins.
        """
        log_probs = batch.spread(self._network(batch)).float().log_softmax(-1)
        index = to_device(tokens, self._device) - self._action_tokenizer.first_id
        away = torch.arange(log_probs.shape[-1], device=self._device) - index[..., None]
        weights = (-0.5 * (away / width) ** 2).softmax(-1)
        return (weights * log_probs).sum(-1)

    def encode(self, actions: np.ndarray) -> np.ndarray:
        """Map actions float32 [B, H, D] to token ids int64 [B, T], step by step and dimension by
        dimension.
        """
        require_chunks(actions, self.config.chunk_size, self.config.action_dim)
        return self._action_tokenizer.encode(actions).reshape(len(actions), -1)

    def decode(self, tokens: np.ndarray) -> np.ndarray:
        """Map token ids int64 [B, T] to actions float32 [B, H, D], in the environment's units."""
        grid = tokens.reshape(len(tokens), self.config.chunk_size, self.config.action_dim)
        return self._action_tokenizer.decode(grid)

    def _logits(self, batch: PrismaticBatch) -> Tensors:
        return (self._network(batch),)
