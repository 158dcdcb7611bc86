"""OpenVLA-OFT as a frozen base. Apart from the others, which do without timm and transformers: 3 s to import."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from vla_rl.engines.policy_model import SampledTokens
from vla_rl.models.openvla_oft.policy import ContinuousOpenVlaOft, OpenVlaOft
from vla_rl.models.prismatic.action_tokens import ActionScaler, ActionTokenizer
from vla_rl.models.prismatic.processor import PrismaticBatch
from vla_rl.models.steered.bases import FrozenBase, TokenBase, TokenRead
from vla_rl.models.steered.config import BaseSource
from vla_rl.types import Sampling


def _pool_rows(hidden: Tensor, feature_rows: int) -> Tensor:
    """Average a trunk's output [N, T, W] over all numbers, or over those of each control step: [N, R * W]."""
    num_decisions, _, width = hidden.shape
    return hidden.reshape(num_decisions, feature_rows, -1, width).mean(2).flatten(1)


class OftTokenBase(TokenBase[OpenVlaOft, PrismaticBatch]):
    """OpenVLA-OFT with action tokens."""

    has_feature_rows = True

    def __init__(self, policy: OpenVlaOft, feature_rows: int, source: BaseSource | None) -> None:
        config = policy.config
        tokenizer = ActionTokenizer(config.llm.vocab_size, config.num_bins, config.action_bounds)
        values = tokenizer.to_unit(np.array(policy.token_ids))
        super().__init__(policy, feature_rows, source, values)
        self._scaler = ActionScaler(config.action_bounds)

    @property
    def first_id(self) -> int:
        """The smallest token id, which stands for the largest action."""
        return self.policy.token_ids.start

    def read(self, batch: PrismaticBatch) -> TokenRead:
        """Compute the trunk once, and the logits from it."""
        hidden = self.policy.network.compute_trunk(batch)
        features = _pool_rows(hidden, self.feature_rows)
        # logits before rows are repeated, as the policy itself computes them
        logits = self.policy.network.read_logits(hidden)
        return TokenRead(batch.per_decision(features), batch.per_decision(logits))

    def choose(self, read: TokenRead, samplings: Sequence[Sampling]) -> SampledTokens:
        """Sample token ids int64 [N, T]."""
        return self.policy.choose(read.logits, samplings)

    def restore(self, numbers: np.ndarray) -> np.ndarray:
        """Apply the statistics of the actions."""
        return self._scaler.from_unit(numbers)

    def normalise(self, actions: np.ndarray) -> np.ndarray:
        """Invert the statistics of the actions; those outside are cut off."""
        return self._scaler.to_unit(actions).astype(np.float32)


class ChunkRead(NamedTuple):
    """One pass of a policy that regresses its chunk.

    Attributes:
        features: [N, Z].
        centre: float32 [N, C * D].
    """

    features: Tensor
    centre: Tensor


class L1Base(FrozenBase[ContinuousOpenVlaOft, PrismaticBatch, ChunkRead]):
    """OpenVLA-OFT with an L1 head."""

    has_feature_rows = True

    def read(self, batch: PrismaticBatch) -> ChunkRead:
        """Compute the trunk once, and the chunk from it."""
        network = self.policy.network
        hidden = network.compute_trunk(batch)
        centre = network.read_chunk(hidden).flatten(1).float()
        return ChunkRead(_pool_rows(hidden, self.feature_rows), centre)

    def features(self, read: ChunkRead) -> Tensor:
        """Return the features of the pass."""
        return read.features

    def choose(self, read: ChunkRead, samplings: Sequence[Sampling]) -> SampledTokens:
        """Sample numbers float32 [N, T]."""
        return self.policy.choose(read.centre, samplings)

    def numbers(self, sampled: SampledTokens) -> Tensor:
        """Return the numbers, which are in these units already."""
        return sampled.tokens

    def restore(self, numbers: np.ndarray) -> np.ndarray:
        """Apply the statistics of the actions."""
        return self.policy.decode(numbers.reshape(len(numbers), -1))

    def normalise(self, actions: np.ndarray) -> np.ndarray:
        """Invert the statistics of the actions."""
        return self.policy.encode(actions).reshape(actions.shape)
