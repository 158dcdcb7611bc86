"""Frozen bases: one reading of an observation gives a head's features and the base's own decision.

    batch ─► read ─► features                      float32 [N, Z]
                 └─► choose, by each row's seed ─► tokens and actions, the base's own bit for bit
                                               └─► numbers: the chunk in units of about [-1, 1]

Of a token policy and of an L1 head, features and decision come from one pass. A flow reads its observation
once and moves its chunk in several steps; the small flow's features need one more step of its expert.
"""

import abc
import hashlib
from collections.abc import Sequence
from pkgutil import resolve_name
from typing import Any, ClassVar, Generic, NamedTuple, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from vla_rl.engines.device_lane import to_device
from vla_rl.engines.policy_model import SampledTokens
from vla_rl.engines.sampling import choose, choose_tokens, seeded_uniforms, to_normal
from vla_rl.errors import ConfigError
from vla_rl.models.flow.network import FlowInputs, Prefix
from vla_rl.models.flow.policy import FlowPolicy
from vla_rl.models.flow.sampler import Draws
from vla_rl.models.mlp import MlpPolicy
from vla_rl.models.prismatic.action_tokens import require_chunks
from vla_rl.models.robot_policy import RobotPolicy
from vla_rl.models.steered.config import BaseSource
from vla_rl.types import Sampling

PolicyT = TypeVar("PolicyT", bound=RobotPolicy)
BatchT = TypeVar("BatchT")
ReadT = TypeVar("ReadT")


class FrozenBase(abc.ABC, Generic[PolicyT, BatchT, ReadT]):
    """A policy whose parameters are never trained, shared by all copies of the head over it.

    Args:
        policy: its network is frozen here, and put into evaluation mode.
        feature_rows: feature vectors of an observation: 1, or one for each control step.
        source: where it was loaded from; None if it was made in this process.
    """

    has_feature_rows: ClassVar[bool] = False
    """Whether its features may be one vector for each control step."""

    def __init__(self, policy: PolicyT, feature_rows: int, source: BaseSource | None) -> None:
        self.policy, self.feature_rows, self.source = policy, feature_rows, source
        policy.network.requires_grad_(False).eval()
        self.digest = compute_base_digest(policy)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return the base itself: a copied head is over the same frozen weights."""
        return self

    @property
    def chunk_size(self) -> int:
        """Control steps of a decision, C."""
        return self.policy.config.chunk_size

    @property
    def action_dim(self) -> int:
        """Numbers of a control step, D."""
        return self.policy.config.action_dim

    @property
    def action_size(self) -> int:
        """Numbers of a chunk, A = C * D."""
        return self.chunk_size * self.action_dim

    @property
    def num_features(self) -> int:
        """Width of `features`, Z."""
        return self.policy.feature_size * self.feature_rows

    @property
    def device(self) -> torch.device:
        """Device of the frozen weights."""
        return next(self.policy.network.parameters()).device

    def move_to(self, device: torch.device) -> None:
        """Move the frozen weights to a device, unless they are there."""
        if self.device != device:
            self.policy.network.to(device)

    @abc.abstractmethod
    def read(self, batch: BatchT) -> ReadT:
        """Compute what features and decisions need, one row for each of N decisions."""

    @abc.abstractmethod
    def features(self, read: ReadT) -> Tensor:
        """Return the features of the observations, float [N, Z]."""

    @abc.abstractmethod
    def choose(self, read: ReadT, samplings: Sequence[Sampling]) -> SampledTokens:
        """Choose as the base itself does, bit for bit."""

    @abc.abstractmethod
    def numbers(self, sampled: SampledTokens) -> Tensor:
        """Return the chosen chunk in units of about [-1, 1], float32 [N, C * D], control step by control step."""

    @abc.abstractmethod
    def restore(self, numbers: np.ndarray) -> np.ndarray:
        """Convert numbers float32 [N, C, D] to the environment's units, float32."""

    @abc.abstractmethod
    def normalise(self, actions: np.ndarray) -> np.ndarray:
        """Convert chunks [N, C, D] in the environment's units to numbers, float32 [N, C, D]."""


class TokenRead(NamedTuple):
    """One pass of a policy that chooses all tokens of a chunk at once.

    Attributes:
        features: [N, Z].
        logits: [N, T, V], over the values of a number, in the order of the token ids.
    """

    features: Tensor
    logits: Tensor


class TokenBase(FrozenBase[PolicyT, BatchT, TokenRead]):
    """A base with a categorical distribution for each number of its chunk.

    Args:
        policy, feature_rows, source: as for every base.
        values: float32 [V], the number in about [-1, 1] that each token id means; rising or falling.
    """

    def __init__(
        self, policy: PolicyT, feature_rows: int, source: BaseSource | None, values: np.ndarray
    ) -> None:
        super().__init__(policy, feature_rows, source)
        self._values = torch.from_numpy(values.astype(np.float32))
        self._is_rising = bool(values[-1] > values[0])

    @property
    @abc.abstractmethod
    def first_id(self) -> int:
        """The smallest token id."""

    def features(self, read: TokenRead) -> Tensor:
        """Return the features of the pass."""
        return read.features

    def numbers(self, sampled: SampledTokens) -> Tensor:
        """Return the middles of the chosen bins."""
        values = to_device(self._values, sampled.tokens.device)
        return values[sampled.tokens - self.first_id]

    def choose_quantiles(self, read: TokenRead, standard: Tensor) -> Tensor:
        """Return the token at a quantile of each distribution, int64 [N, T].

        Args:
            read: the pass.
            standard: float32 [N, T]; the quantile is the standard normal's cumulative distribution of it, by
                rising numbers. For a Gaussian that would be the number mean + std * standard.
        """
        uniforms = torch.special.ndtr(standard.double())
        uniforms = uniforms if self._is_rising else 1.0 - uniforms
        ones = torch.ones(len(standard), device=standard.device)
        chosen, _ = choose(read.logits, ones, torch.zeros_like(ones, dtype=torch.bool), uniforms)
        return chosen + self.first_id

    def find_quantiles(self, read: TokenRead, samplings: Sequence[Sampling]) -> Tensor:
        """Return the standard normal numbers by which the base chooses on its own, float32 [N, T].

        Of a greedy row they are 0, the median of each distribution, because it is chosen without chance.
        """
        uniforms = seeded_uniforms(samplings, read.logits.shape[1])
        standard = to_normal(uniforms) * (1.0 if self._is_rising else -1.0)
        is_greedy = torch.tensor([sampling.greedy for sampling in samplings])
        return to_device(standard.masked_fill(is_greedy[:, None], 0.0), read.logits.device)


class MlpBase(TokenBase[MlpPolicy, Tensor]):
    """An MLP over a state vector."""

    def __init__(self, policy: MlpPolicy, feature_rows: int, source: BaseSource | None) -> None:
        super().__init__(
            policy, feature_rows, source, np.linspace(-1.0, 1.0, policy.config.num_bins)
        )
        self._low = np.array(policy.config.action_low)
        self._range = np.array(policy.config.action_high) - self._low

    @property
    def first_id(self) -> int:
        """The smallest token id, 0."""
        return 0

    def read(self, batch: Tensor) -> TokenRead:
        """Compute hidden layers and logits."""
        network = self.policy.network
        features = network.features(to_device(batch, self.device))
        return TokenRead(features, network.logits(features))

    def choose(self, read: TokenRead, samplings: Sequence[Sampling]) -> SampledTokens:
        """Sample bins int64 [N, T]."""
        return SampledTokens(*choose_tokens(read.logits, samplings))

    def restore(self, numbers: np.ndarray) -> np.ndarray:
        """Map [-1, 1] to the range of the actions; numbers outside are cut off."""
        share = (np.clip(numbers.astype(np.float64), -1.0, 1.0) + 1.0) / 2.0
        actions: np.ndarray = self._low + self._range * share
        return actions.astype(np.float32)

    def normalise(self, actions: np.ndarray) -> np.ndarray:
        """Map the range of the actions to [-1, 1]."""
        unit: np.ndarray = 2.0 * (actions.astype(np.float64) - self._low) / self._range - 1.0
        return np.clip(unit, -1.0, 1.0).astype(np.float32)


class FlowBase(FrozenBase[FlowPolicy, FlowInputs, Prefix]):
    """A flow policy; only executed rows and the robot's dimensions are numbers of its chunk."""

    def read(self, batch: FlowInputs) -> Prefix:
        """Read images, prompt and state once. Raises: ValueError for a plan that is to be continued."""
        if batch.planned is not None:
            raise ValueError(
                "an observation has a plan to continue (planned_actions), which a head over a flow policy does "
                "not do; leave it out, or act with the base alone."
            )
        return self.policy.read(batch)

    def features(self, read: Prefix) -> Tensor:
        """Return the network's features of the observations alone."""
        network: Any = self.policy.network
        features: Tensor = network.features(read)
        return features

    def choose(self, read: Prefix, samplings: Sequence[Sampling]) -> SampledTokens:
        """Run a chain from the noise of each seed."""
        return self.policy.choose(read, samplings)

    def choose_from_noise(
        self, read: Prefix, noise: Tensor, samplings: Sequence[Sampling]
    ) -> Tensor:
        """Run a deterministic chain from given noise, and return its chunk as the network's numbers [N, C * D].

        Args:
            read: the observations.
            noise: float32 [N, C, D], first noise of the executed rows in the robot's dimensions. Later rows repeat
                the last one; padded dimensions repeat the D numbers, so that nothing depends on noise that was
                not chosen.
            samplings: one for each row.
        """
        network: Any = self.policy.network
        rows = torch.arange(network.horizon, device=noise.device).clamp(max=noise.shape[1] - 1)
        dims = torch.arange(network.action_dim, device=noise.device) % self.action_dim
        return self.numbers(self.policy.choose(read, samplings, noise[:, rows][:, :, dims]))

    def draw_noise(self, samplings: Sequence[Sampling]) -> Tensor:
        """Return the first noise of the executed rows that the base draws on its own, float32 [N, C, D]."""
        network: Any = self.policy.network
        schedule = self.policy.config.sampling.schedule
        draws = Draws.from_seeds(samplings, (network.horizon, network.action_dim), schedule)
        return to_device(draws.noise[:, : self.chunk_size, : self.action_dim], self.device)

    def numbers(self, sampled: SampledTokens) -> Tensor:
        """Return the end of the chain."""
        assert sampled.chunk is not None
        return sampled.chunk

    def restore(self, numbers: np.ndarray) -> np.ndarray:
        """Apply the statistics of the actions."""
        return self.policy.decode(numbers.reshape(len(numbers), -1))

    def normalise(self, actions: np.ndarray) -> np.ndarray:
        """Invert the statistics of the actions."""
        require_chunks(actions, self.chunk_size, self.action_dim)
        return self.policy.encode(actions).reshape(actions.shape)


def freeze_base(
    policy: RobotPolicy, has_feature_rows: bool = False, source: BaseSource | None = None
) -> FrozenBase[Any, Any, Any]:
    """Freeze a policy and return it as a base.

    Args:
        policy: of a family whose class names its `FrozenBase` in `frozen_base`, as `module:Class`.
        has_feature_rows: whether its features are one vector for each control step.
        source: where it was loaded from.

    Raises: ConfigError for another family, one whose actions are offsets from the state, or for rows of features
    that it does not have.
    """
    path: str | None = getattr(policy, "frozen_base", None)
    if path is None:
        raise ConfigError(
            f"a {type(policy).__name__} cannot be the frozen base of a head, expected one that decides a whole "
            "chunk: an MLP, OpenVLA-OFT with tokens or an L1 head, a flow, or a family that names a `frozen_base`"
        )
    if getattr(policy.config, "state_offsets", 0):
        raise ConfigError(
            "the policy's actions are offsets from the state (state_offsets), over which no head is trained; take a "
            "base that gives the arm's own actions"
        )
    base: type[FrozenBase[Any, Any, Any]] = resolve_name(path)
    if has_feature_rows and not base.has_feature_rows:
        raise ConfigError(
            f"features is 'rows', but a {type(policy).__name__} has one vector for each observation; set it to mean"
        )
    return base(policy, policy.config.chunk_size if has_feature_rows else 1, source)


def compute_base_digest(policy: Any) -> str:
    """Return the digest of a frozen base, 64 hexadecimal digits: SHA-256 of its tensors and small files in memory.

    Features and references of stored transitions belong to one base; the digest names it whatever its folder's
    path is, and changes with every weight, statistic and setting of its sampling.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(policy.checkpoint_tensors().items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        digest.update(content.numpy().data)
    for name, data in sorted(policy.checkpoint_files().items()):
        digest.update(f"{name} {len(data)}\n".encode())
        digest.update(data)
    return digest.hexdigest()
