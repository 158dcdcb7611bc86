"""A small head over a frozen base, behind the one interface of engines, learners and evaluators.

    acting     observation ─► base, once ─► features, reference ─► head ─► action ─► chunk
                                            └──────────┴─► `drawn`         └─► tokens, densities
    learning   `drawn`, tokens ─► head ─► densities                        no image, no pass of the base

The "tokens" of a decision are the float32 numbers of the head's action (`kinds.py`), and their log-probs its
Gaussian densities. A head that is off is the base, bit for bit: the same draws, the same tokens, the same
actions; its decisions are recorded as the head would have made them.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from vla_rl.engines.device_lane import to_device
from vla_rl.engines.policy_model import PolicyModel, SampledTokens
from vla_rl.engines.sampling import sampling_columns
from vla_rl.errors import CheckpointError
from vla_rl.models.example_inputs import example_observation
from vla_rl.models.families import CONFIG_FILE, find_family
from vla_rl.models.prismatic.action_tokens import require_chunks
from vla_rl.models.prismatic.conventions import AS_STORED
from vla_rl.models.robot_policy import RobotPolicy
from vla_rl.models.small_files import save_folder
from vla_rl.models.steered.bases import FrozenBase, freeze_base
from vla_rl.models.steered.config import BaseSource, HeadSizes, SteeredConfig, SteeringConfig
from vla_rl.models.steered.decisions import (
    STATE_KEY,
    HeadInputs,
    SteeredBatch,
    check_drawn,
    draw_noise,
    list_drawn_sizes,
    read_proprio,
)
from vla_rl.models.steered.file import SteeredFile
from vla_rl.models.steered.heads import SteeringDistribution, SteeringHead
from vla_rl.models.steered.kinds import make_steering
from vla_rl.models.weight_files import check_names
from vla_rl.replay.transitions import TransitionLayout
from vla_rl.types import Observation, Sampling
from vla_rl.types.observation import DRAWN_KEY

TENSOR_PREFIX: Final = "steering_head."
"""Prefix of the head's tensors in a folder, by which the family is recognised."""


class SteeredPolicy(PolicyModel[SteeredBatch]):
    """A `PolicyModel` whose `network` is the head alone. Build one with `create` or `load`.

    Args:
        base: shared with every copy; its parameters are in no `network.parameters()` and in no checkpoint.
        config: settings of the head.
        network: made for this base.
        files: other small files of the folder that it was loaded from.
    """

    def __init__(
        self,
        base: FrozenBase[Any, Any, Any],
        config: SteeringConfig,
        network: SteeringHead,
        files: Mapping[str, bytes] | None = None,
    ) -> None:
        self.base, self._network, self._files = base, network, dict(files or {})
        self._steering = make_steering(config, base)
        facts = base.policy.config
        sizes = [size for size in (facts.state_size, config.proprio_size or None) if size]
        self.config = SteeredConfig(
            cameras=facts.cameras,
            state_size=max(sizes, default=None),
            chunk_size=base.chunk_size,
            action_dim=base.action_dim,
            steering=config,
            base_digest=base.digest,
        )

    @classmethod
    def create(
        cls,
        base: RobotPolicy | FrozenBase[Any, Any, Any],
        config: SteeringConfig,
        seed: int,
        source: BaseSource | None = None,
        files: Mapping[str, bytes] | None = None,
    ) -> "SteeredPolicy":
        """Create a policy with a new head from `seed`; the global random state is left unchanged.

        Args:
            base: a policy, whose network is frozen; or what another head is over.
            config: settings of the head.
            seed: seed of its weights.
            source: where the base was loaded from, so that a saved head finds it again.
            files: other small files to save with the head.

        Raises: ConfigError if the base does not suit the settings.
        """
        if not isinstance(base, FrozenBase):
            base = freeze_base(base, config.features == "rows", source)
        sizes = HeadSizes(
            features=base.num_features,
            proprio=config.proprio_size,
            action=base.action_size,
            action_dim=base.action_dim,
        )
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            network = SteeringHead(config, sizes, base).to(base.device)
        return cls(base, config, network, files)

    @classmethod
    def load(cls, folder: Path) -> "SteeredPolicy":
        """Read a folder that `save` wrote, over the base that it names: for processes that are given a folder only.

        Raises: CheckpointError naming what is missing, unknown or damaged, or if the base is another one.
        """
        family = find_family(folder)
        policy = family and family.load_policy(folder, AS_STORED, torch.device("cpu"))
        if not isinstance(policy, cls):
            raise CheckpointError(
                f"{folder} holds {family.name if family else 'no head'}, expected a head over a frozen base; load "
                "it with vla_rl.load_policy."
            )
        return policy

    @property
    def network(self) -> SteeringHead:
        """The head, which holds the parameters that are trained."""
        return self._network

    @property
    def is_steering(self) -> bool:
        """Whether the head acts; if not, the base does."""
        return bool(self._network.is_on > 0.5)

    def steer(self, is_on: bool) -> None:
        """Let the head act, or the base alone. It travels with the weights, so publish them after it."""
        with torch.no_grad():
            self._network.is_on.fill_(float(is_on))

    @property
    def layout(self) -> TransitionLayout:
        """Sizes of a stored decision of this policy."""
        sizes = self._network.sizes
        return TransitionLayout(
            features=sizes.features,
            proprio=sizes.proprio,
            action=sizes.action,
            horizon=self.config.chunk_size,
            action_dim=self.config.action_dim,
            kind=self.config.steering.kind,
            base_digest=self.base.digest,
        )

    @property
    def feature_size(self) -> int:
        """Width of the head's last hidden layer."""
        return self.config.steering.hidden[-1]

    def copy(self) -> "SteeredPolicy":
        """Return the same policy with its own copy of the head, over the same base."""
        network = SteeringHead(self.config.steering, self._network.sizes, self.base)
        network.load_state_dict(self._network.state_dict())
        network.to(self._device)
        return SteeredPolicy(self.base, self.config.steering, network, self._files)

    def describe(self) -> str:
        """Describe in one line how it acts."""
        number = sum(each.numel() for each in self._network.parameters() if each.requires_grad)
        kind, state = self.config.steering.kind, "on" if self.is_steering else "off"
        return f"{kind} head of {number:,} parameters, {state}, over: {self.base.policy.describe()}"

    def example_observation(self, seed: int) -> Observation:
        """Return an observation of noise that it can act on and score."""
        seen = example_observation(self.base.policy, seed)
        assert seen is not None
        observed = {name: value for name, value in seen.items() if name != DRAWN_KEY}
        size, state = self.config.state_size, observed.get(STATE_KEY)
        if size is not None and (state is None or len(state) < size):
            observed[STATE_KEY] = np.zeros(size, np.float32)
        random = np.random.default_rng(seed)
        drawn = {
            name: random.normal(size=length).astype(np.float32)
            for name, length in list_drawn_sizes(self._network.sizes).items()
        }
        return {**observed, DRAWN_KEY: drawn}

    def example_tokens(self) -> Tensor:
        """Return an action of zeros, float32 [1, A], for the same estimates."""
        return torch.zeros(1, self._network.sizes.action)

    def check_drawn(self, drawn: Mapping[str, np.ndarray] | None) -> None:
        """Check what a decision has drawn, before it is scored.

        Raises: ValueError for what is missing or of another size.
        """
        check_drawn(self._network.sizes, drawn)

    def prepare(self, observations: Sequence[Observation]) -> SteeredBatch:
        """Prepare observations for the base, or stored decisions, which have `drawn`, for the head alone.

        Raises: ValueError for observations that do not suit the policy, or if only some have `drawn`.
        """
        drawn = [each[DRAWN_KEY] for each in observations if DRAWN_KEY in each]
        if not drawn:
            size = self._network.sizes.proprio
            proprio = self._stack([read_proprio(each, size) for each in observations])
            return SteeredBatch(proprio, self.base.policy.prepare(observations))
        if len(drawn) < len(observations):
            raise ValueError(
                f"{len(drawn)} of {len(observations)} observations have {DRAWN_KEY!r}, expected all or none"
            )
        columns = [
            self._stack([np.asarray(each[name]) for each in drawn])
            for name in ("proprio", "features", "reference")
        ]
        proprio, features, reference = columns
        return SteeredBatch(proprio, None, features, reference)

    def sample(self, batch: SteeredBatch, samplings: Sequence[Sampling]) -> SampledTokens:
        """Choose actions float32 [N, A]; greedy ones are the mode, off ones the base's own.

        The temperature multiplies the standard deviation; of a head that is off it is the base's temperature.
        """
        seen = self._see(batch, samplings)
        temperatures, is_greedy = sampling_columns(samplings, self._device)
        distribution = self._distribution(seen).tempered(temperatures)
        if self.is_steering:
            noise = to_device(draw_noise(samplings, self._network.sizes.action), self._device)
            explored = distribution.sample(noise)
            action = torch.where(is_greedy[:, None], distribution.mode, explored)
            chunk = self._steering.steer(seen.read, action, samplings)
        else:
            chosen = self.base.choose(seen.read, samplings)
            action = self._steering.express(seen.read, samplings, chosen)
            chunk = chosen.tokens if chosen.chunk is None else chosen.chunk
        return SampledTokens(action, distribution.log_prob(action), seen.drawn, chunk)

    def log_probs(
        self, batch: SteeredBatch, tokens: Tensor, temperatures: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return densities and entropies of given actions, float32 [N, A] each.

        The entropy is the Gaussian's, before a limit squashes it. Stored decisions need no pass of the base.
        """
        temperatures = to_device(temperatures, self._device)
        distribution = self._distribution(self._see(batch)).tempered(temperatures)
        action = to_device(tokens, self._device).float()
        if action.shape != distribution.mean.shape:
            raise ValueError(
                f"actions are {list(action.shape)}, expected {list(distribution.mean.shape)}: those of a head of "
                "this kind over this base."
            )
        return distribution.log_prob(action), distribution.entropy

    def features(self, batch: SteeredBatch) -> Tensor:
        """Return the head's last hidden layer, float32 [N, feature_size]."""
        seen = self._see(batch)
        return self._network.hidden(seen.features, seen.proprio, seen.reference)

    def describe_states(self, observations: Sequence[Observation]) -> dict[str, np.ndarray]:
        """Return the head's inputs for observations: features [N, Z], proprio [N, P], reference [N, A], float32.

        Call it on the device lane. The reference is the base's greedy decision; that of a flow starts from the
        noise of seed 0.
        """
        with torch.inference_mode():
            seen = self._see(self.prepare(observations))
        return {name: values.cpu().numpy() for name, values in seen.drawn.items()}

    def encode(self, actions: np.ndarray) -> np.ndarray:
        """Convert chunks [B, C, D] in the environment's units to actions of a residual head, float32 [B, A].

        Raises: ValueError for a head that steers, because a chunk does not tell what would lead to it.
        """
        if self.config.steering.steers:
            raise ValueError(
                f"a head of the kind {self.config.steering.kind!r} cannot imitate chunks, expected the kind "
                "residual; choose it for demonstrations and an expert's labels"
            )
        require_chunks(actions, self.config.chunk_size, self.config.action_dim)
        return self.base.normalise(actions).reshape(len(actions), -1)

    def decode(self, tokens: np.ndarray) -> np.ndarray:
        """Convert a residual head's actions, or the base's tokens, to chunks float32 [B, C, D] in the
        environment's units.
        """
        if self.config.steering.steers or tokens.dtype.kind == "i":
            chunks: np.ndarray = self.base.policy.decode(tokens)
            return chunks
        shape = (len(tokens), self.config.chunk_size, self.config.action_dim)
        return self.base.restore(tokens.reshape(shape))

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """Return the head's parameters under their names in the folder; views, not copies."""
        return {f"{TENSOR_PREFIX}{name}": each for name, each in self._network.state_dict().items()}

    def checkpoint_files(self) -> Mapping[str, bytes]:
        """Return `config.json`, which has the base's digest and folder, and the loaded folder's other small files."""
        file = SteeredFile(
            steering=self.config.steering,
            sizes=self._network.sizes,
            base_digest=self.base.digest,
            base=self.base.source,
        )
        return {**self._files, CONFIG_FILE: file.encode()}

    def load_checkpoint_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy tensors with the folder's names into the head; every name and shape has to match."""
        check_names(self.checkpoint_tensors(), tensors)
        own = {name.removeprefix(TENSOR_PREFIX): each for name, each in tensors.items()}
        self._network.load_state_dict(own)

    def save(self, folder: Path) -> None:
        """Write the head to a new folder, whole or not at all. Raises: CheckpointError."""
        save_folder(folder, self.checkpoint_tensors(), self.checkpoint_files())

    @property
    def _device(self) -> torch.device:
        return self._network.is_on.device

    def _see(self, batch: SteeredBatch, samplings: Sequence[Sampling] = ()) -> HeadInputs:
        """Return the head's inputs: those that are stored, or those that the base computes now."""
        if batch.features is not None and batch.reference is not None:
            return HeadInputs(batch.features, batch.proprio, batch.reference)
        # The base is never trained; without this each forward would keep its activations.
        with torch.no_grad():
            read = self.base.read(batch.observed)
            features = self.base.features(read).float()
            greedy = samplings or [Sampling(greedy=True)] * len(features)
            reference = self._steering.refer(read, greedy)
        return HeadInputs(features, batch.proprio, reference, read)

    def _distribution(self, seen: HeadInputs) -> SteeringDistribution:
        if self.is_steering:
            return self._network.distribution(seen.features, seen.proprio, seen.reference)
        return self._network.make_base_distribution(seen.reference)

    def _stack(self, rows: Sequence[np.ndarray]) -> Tensor:
        return to_device(torch.from_numpy(np.stack(rows).astype(np.float32)), self._device)
