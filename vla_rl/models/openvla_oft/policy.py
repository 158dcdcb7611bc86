"""The OpenVLA-OFT policy: network, processor and action tokens behind the one interface of engines
and learners.
"""

from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from vla_rl.algorithms import entropy
from vla_rl.engines.cuda_graphs import Tensors
from vla_rl.engines.sampling import choose_tokens, tempered_log_probs
from vla_rl.models.openvla_oft import checkpoint
from vla_rl.models.openvla_oft.config import NewPart, OpenVlaOftConfig
from vla_rl.models.openvla_oft.network import OpenVlaOftNetwork
from vla_rl.models.openvla_oft.oft_policy import OftPolicy
from vla_rl.models.prismatic.action_tokens import ActionTokenizer
from vla_rl.models.prismatic.config import AdapterUse, Normalization
from vla_rl.models.prismatic.dialects import Dialect
from vla_rl.models.prismatic.folder import PublicFolder, open_folder
from vla_rl.models.prismatic.policy import require_chunks
from vla_rl.models.prismatic.processor import PrismaticBatch
from vla_rl.models.prismatic.saving import read_tokenizer
from vla_rl.types import Sampling


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

    @classmethod
    def load(
        cls,
        folder: Path | str | PublicFolder,
        *,
        norm_key: str | None = None,
        normalization: Normalization | None = None,
        dialect: Dialect | None = None,
        cameras: tuple[str, ...] | None = None,
        chunk_size: int | None = None,
        adapter: Path | str | None = None,
        adapter_use: AdapterUse = "merge",
        new_parts: Collection[NewPart] = (),
        seed: int = 0,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
    ) -> "OpenVlaOft":
        """Read a checkpoint in the public layout, shard by shard, without holding it in memory
        twice.

        Args:
            folder: a folder, read already or not, or a hub id such as
                `Haozhan72/Openvla-oft-SFT-libero-goal-traj1`.
            norm_key: key of its action statistics; optional if there is one set only, or one was
                chosen before.
            normalization: which values of the statistics bound the action; None for the
                checkpoint's own, else the percentiles.
            dialect: project whose conventions it was trained with; None for the checkpoint's own,
                else OpenVLA-OFT's.
            cameras: observation keys of its images; None for the checkpoint's own, else the fixed
                camera alone.
            chunk_size: control steps in a chunk; None for the checkpoint's own, else the 8 of
                LIBERO's 7 numbers an action.
            adapter: a folder or hub id of a peft adapter that was trained on this checkpoint; parts
                beside it replace the checkpoint's. Not needed if the folder is itself an adapter:
                it names its base.
            adapter_use: `merge` it into the weights, or keep it to `train` it.
            new_parts: parts that it lacks and that fine-tuning is to add, such as
                `proprio_projector`.
            seed: seed of the new parts' weights.
            dtype: data type of the parameters; None keeps the files'.
            device: device of the parameters.

        Raises: CheckpointError naming what is missing, unknown or damaged, or how much memory is
        lacking.
        """
        origin = open_folder(folder, adapter)
        config = checkpoint.config_of(
            origin,
            "tokens",
            norm_key=norm_key,
            normalization=normalization,
            dialect=dialect,
            cameras=cameras,
            chunk_size=chunk_size,
            adapter_use=adapter_use,
            new_parts=new_parts,
        )
        tokenizer = read_tokenizer(config)
        network = checkpoint.load_network(config, origin, dtype, device, new_parts, seed)
        return cls(config, network, tokenizer, origin)

    def sample(self, batch: PrismaticBatch, samplings: Sequence[Sampling]) -> tuple[Tensor, Tensor]:
        """Sample token ids int64 [B, T]; return them and their log-probs float32 [B, T]."""
        (logits,) = self._acting(self._logits, batch)
        chosen, log_probs = choose_tokens(logits, samplings)
        return chosen + self._action_tokenizer.first_id, log_probs

    def log_probs(
        self, batch: PrismaticBatch, tokens: Tensor, temperatures: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return log-probs and entropies of the given token ids, float32 [B, T] each, over the
        action tokens only.
        """
        logits = self._network(batch)
        index = tokens.to(self._device) - self._action_tokenizer.first_id
        log_probs = tempered_log_probs(logits, temperatures.to(self._device))
        # log_probs are logits too: their softmax is the same distribution
        return log_probs.gather(-1, index[..., None])[..., 0], entropy(log_probs)

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
