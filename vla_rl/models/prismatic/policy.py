"""What a policy on a Prismatic network is, whichever way it speaks: weights, processor, copies, adapters, checkpoints.

    PrismaticPolicy ─┬─ OpenVla                    one action token after the other
                     └─ OftPolicy ─┬─ OpenVlaOft             a chunk of tokens in one pass
                                   └─ ContinuousOpenVlaOft   a chunk of numbers

A family adds how it acts and is scored (`sample`, `log_probs`), what its tokens mean (`encode`, `decode`), and what its
checkpoint says of itself (`checkpoint_files`).
"""

import abc
import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Generic, Self, TypeVar

import msgspec
import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from vla_rl.engines.cuda_graphs import Compute, CudaRecorder, Record, ReplayedCall, Tensors
from vla_rl.engines.policy_model import PolicyModel
from vla_rl.models.prismatic.config import LoraConfig, PrismaticConfig, ProprioConfig
from vla_rl.models.prismatic.folder import PublicFolder
from vla_rl.models.prismatic.lora import merged_tensors, with_weights
from vla_rl.models.prismatic.network import PrismaticNetwork
from vla_rl.models.prismatic.processor import PrismaticBatch, PrismaticProcessor
from vla_rl.models.prismatic.public_config import inner_name, public_name
from vla_rl.models.prismatic.recompute import recompute_in_backward
from vla_rl.models.prismatic.saving import read_tokenizer
from vla_rl.models.prismatic.weights import check_names
from vla_rl.models.prismatic.writing import write_weights
from vla_rl.types import Observation

ConfigT = TypeVar("ConfigT", bound=PrismaticConfig)
NetworkT = TypeVar("NetworkT", bound=PrismaticNetwork)

PROMPT_WIDTH: Final = 16
"""Widths of prompts that are replayed are multiples of this."""


class PrismaticPolicy(PolicyModel[PrismaticBatch], Generic[ConfigT, NetworkT]):
    """A `PolicyModel` on two vision towers, a projector and a Llama.

    Args:
        config: of the network and of what it sees and says.
        network: built from `config`; put into evaluation mode, as there is no dropout here.
        tokenizer: makes ids of prompts.
        origin: the folder it was read from, whose other small files are saved with it; None for random weights.
    """

    def __init__(
        self, config: ConfigT, network: NetworkT, tokenizer: Tokenizer, origin: PublicFolder | None = None
    ) -> None:
        self.config = config
        self._network, self._tokenizer, self._origin = network, tokenizer, origin
        network.eval()
        self._record: Record | None = None
        self._replayed: dict[str, ReplayedCall] = {}
        self._processor = PrismaticProcessor(config, tokenizer, self._proprio)

    @classmethod
    def create(cls, config: ConfigT, seed: int) -> Self:
        """Random weights from `seed`; the global random state stays as it was."""
        tokenizer = read_tokenizer(config)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            network = cls.build_network(config)
        return cls(config, network, tokenizer)

    @staticmethod
    @abc.abstractmethod
    def build_network(config: ConfigT) -> NetworkT:
        """A network with new weights, from the global random state."""

    def save(self, folder: Path | str) -> None:
        """Write the public layout to a new folder, all of it or nothing. Raises: CheckpointError."""
        index = None if self._origin is None else self._origin.index
        tensors, parts = self._files_of(self.checkpoint_tensors())
        write_weights(Path(folder), tensors, self.checkpoint_files(), index, parts)

    def copy(self) -> Self:
        """The same policy with weights of its own."""
        copied = type(self)(self.config, copy.deepcopy(self._network), self._tokenizer, self._origin)
        if self._record is not None:
            copied.replay_acting(True, self._record)
        return copied

    def adapted(self, lora: LoraConfig, seed: int) -> Self:
        """The same policy, whose adapters are trained in place of its weights; it acts as before at first.

        Adapters that it has already are merged into the weights.
        """
        return self._rebuilt(lora, merged_tensors(self._network), seed)

    def merged(self) -> Self:
        """The same policy with its adapters merged into the weights, to be saved for whoever knows no adapters."""
        return self._rebuilt(None, merged_tensors(self._network), seed=0)

    def recompute_activations(self) -> None:
        """From now on a backward pass computes again what blocks of towers and trunk computed, in place of keeping it."""
        recompute_in_backward(*self._network.block_stacks())

    def replay_acting(self, is_wanted: bool, record: Record | None = None) -> None:
        """Whether acting without a gradient is recorded and replayed from now on; if not, recordings are given up.

        For a network on a GPU. There is one recording for each number of rows and width of prompts, both filled up.

        Args:
            is_wanted: whether.
            record: makes a recording; None for CUDA graphs.
        """
        self._record = (record or CudaRecorder()) if is_wanted else None
        self._replayed.clear()

    @property
    def network(self) -> NetworkT:
        """The parameters."""
        return self._network

    @property
    def tokenizer(self) -> Tokenizer:
        """Makes ids of prompts."""
        return self._tokenizer

    @property
    def feature_size(self) -> int:
        """Width of the language model."""
        return self.config.llm.hidden_size

    def prepare(self, observations: Sequence[Observation]) -> PrismaticBatch:
        """One row for each observation, on the network's device."""
        return self._processor.prepare(observations, self._device)

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """Parameters under their public names; views, not copies."""
        return {public_name(name): tensor for name, tensor in self._network.state_dict().items()}

    def load_checkpoint_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy tensors with public names into the network; every name and shape has to fit."""
        check_names(self.checkpoint_tensors(), tensors)
        self._network.load_state_dict({inner_name(name): tensor for name, tensor in tensors.items()})

    def _files_of(
        self, tensors: Mapping[str, Tensor]
    ) -> tuple[Mapping[str, Tensor], Mapping[str, Mapping[str, Tensor]]]:
        """Which tensors are the main weights, and which stand in files of their own, by file name, when it is saved."""
        return tensors, {}

    @property
    def _proprio(self) -> ProprioConfig | None:
        """The numbers that the policy reads beside the pictures, where it does."""
        return None

    def _acting(self, compute: Compute, batch: PrismaticBatch, *columns: Tensor) -> Tensors:
        """`compute(batch, *columns)`, a method of this policy, or what replaying it gives where that was asked for.

        Columns are tensors [B, ...], and so are the results.
        """
        if self._record is None or torch.is_grad_enabled():
            return compute(batch, *columns)
        num_columns = len(batch.columns)

        def computed(*inputs: Tensor) -> Tensors:
            return compute(PrismaticBatch(*inputs[:num_columns]), *inputs[num_columns:])

        replayed = self._replayed.get(compute.__name__)
        if replayed is None:
            replayed = self._replayed[compute.__name__] = ReplayedCall(self._network, self._record)
        batch = batch.widened(PROMPT_WIDTH, self.config.llm.pad_token_id)
        return replayed(computed, *batch.columns, *columns)

    @property
    def _device(self) -> torch.device:
        return next(self._network.parameters()).device

    def _rebuilt(self, lora: LoraConfig | None, tensors: Mapping[str, Tensor], seed: int) -> Self:
        config = msgspec.structs.replace(self.config, lora=lora)
        network = with_weights(lambda: self.build_network(config), tensors, seed)
        return type(self)(config, network, self._tokenizer, self._origin)


def require_chunks(actions: np.ndarray, chunk_size: int, action_dim: int) -> None:
    """Raise ValueError unless `actions` are chunks [B, chunk_size, action_dim]."""
    if actions.ndim != 3 or actions.shape[1:] != (chunk_size, action_dim):
        raise ValueError(f"actions are {list(actions.shape)}, expected [B, {chunk_size}, {action_dim}].")
