"""A multilayer perceptron over a state vector, for low-dimensional environments.

    state [B, D] ─► tanh layers ─► features [B, F] ─► logits [B, T, bins] ─► one token a number ─► actions [B, H, A]

Tokens count the bins from the lowest action, 0 to num_bins - 1; they are sampled independently of
each other. This is the smallest example of a policy family in one file.
"""

import copy
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Final

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from vla_rl.algorithms import entropy
from vla_rl.engines.device_lane import to_device
from vla_rl.engines.policy_model import PolicyModel, SampledTokens
from vla_rl.engines.sampling import choose_tokens, tempered_log_probs
from vla_rl.errors import CheckpointError
from vla_rl.models.observed_values import require_dicts
from vla_rl.models.small_files import companion_files, save_folder
from vla_rl.models.weight_files import read_weights
from vla_rl.types import Config, Observation, PositiveInt, Sampling


class MlpConfig(Config, frozen=True, kw_only=True):
    """An MLP from a state vector to one categorical distribution for each value of an
    action chunk.

    Example:
        MlpConfig(state_size=4, action_low=(0.0,), action_high=(1.0,), num_bins=2)  # CartPole
    """

    state_size: PositiveInt
    """Length of `observation["state"]`."""

    action_low: Annotated[tuple[float, ...], msgspec.Meta(min_length=1)]
    """Lowest action, one value for each dimension."""

    action_high: tuple[float, ...]
    """Highest action, one value for each dimension."""

    num_bins: Annotated[int, msgspec.Meta(ge=2)]
    """Values that each dimension can take, evenly spaced from low to high, both included. A
    discrete action of n choices is one dimension from 0 to n - 1 with n bins."""

    chunk_size: PositiveInt = 1
    """Control steps chosen at once."""

    hidden: Annotated[tuple[PositiveInt, ...], msgspec.Meta(min_length=1)] = (64, 64)
    """Widths of the hidden layers."""

    state_scale: tuple[float, ...] | None = None
    """Divisor for each value of the state, so that it is of order one; none leaves the state
    unscaled."""

    def __post_init__(self) -> None:
        self.require(
            len(self.action_low) == len(self.action_high),
            "action_high",
            f"{len(self.action_low)} numbers",
        )
        rising = all(
            low < high for low, high in zip(self.action_low, self.action_high, strict=True)
        )
        self.require(
            rising, "action_high", f"above action_low = {self.action_low} in every dimension"
        )
        scale = self.state_scale
        fits = scale is None or (len(scale) == self.state_size and min(scale) > 0.0)
        self.require(fits, "state_scale", f"{self.state_size} numbers above 0, or none")

    @property
    def cameras(self) -> tuple[str, ...]:
        """No cameras: it sees a state alone."""
        return ()

    @property
    def action_dim(self) -> int:
        """Dimensions of the action of one control step."""
        return len(self.action_low)

    @property
    def num_tokens(self) -> int:
        """Tokens of one decision: one for each value of the chunk, step by step."""
        return self.chunk_size * self.action_dim


CONFIG_FILE: Final = "config.json"
HEAD_GAIN: Final = 0.01
"""Gain of the last layer's initial weights: a new policy acts nearly uniformly."""


class MlpNetwork(nn.Module):
    """Tanh layers with orthogonal weights and a linear head (Andrychowicz et al. 2020,
    arXiv:2006.05990, section 3.2).
    """

    def __init__(self, config: MlpConfig) -> None:
        super().__init__()
        widths = (config.state_size, *config.hidden)
        layers = [nn.Linear(width, next_width) for width, next_width in itertools.pairwise(widths)]
        self.body = nn.Sequential(*(module for layer in layers for module in (layer, nn.Tanh())))
        self.head = nn.Linear(widths[-1], config.num_tokens * config.num_bins)
        for layer, gain in [(layer, 2.0**0.5) for layer in layers] + [(self.head, HEAD_GAIN)]:
            nn.init.orthogonal_(layer.weight, gain)
            nn.init.zeros_(layer.bias)
        scale = (
            torch.ones(config.state_size)
            if config.state_scale is None
            else torch.tensor(config.state_scale)
        )
        # Not persistent: the scale is in config.json, and two sources of one fact may differ.
        self.register_buffer("state_scale", scale, persistent=False)
        self._shape = (config.num_tokens, config.num_bins)

    def features(self, states: Tensor) -> Tensor:
        """Return the output of the last hidden layer, [B, F]."""
        scaled: Tensor = states / self.get_buffer("state_scale")
        features: Tensor = self.body(scaled)
        return features

    def logits(self, features: Tensor) -> Tensor:
        """Return the logits for features [B, F], [B, T, num_bins]."""
        logits: Tensor = self.head(features).unflatten(1, self._shape)
        return logits

    def forward(self, states: Tensor) -> Tensor:
        """Return the logits, [B, T, num_bins]."""
        return self.logits(self.features(states))


class MlpPolicy(PolicyModel[Tensor]):
    """A `PolicyModel` that sees `observation["state"]` only. Build one with `create` or `load`."""

    has_token_means = True
    """Whether `Sampling.by_mean` takes the means of its tokens."""

    frozen_base = "vla_rl.models.steered.bases:MlpBase"
    """Class of the base that it is under a head."""

    def __init__(
        self,
        config: MlpConfig,
        network: MlpNetwork,
        files: Mapping[str, bytes] | None = None,
    ) -> None:
        self.config = config
        self._network, self._files = network, dict(files or {})
        low, high = np.array(config.action_low), np.array(config.action_high)
        self._bins = low[:, None] + (high - low)[:, None] * np.linspace(0.0, 1.0, config.num_bins)

    @classmethod
    def create(cls, config: MlpConfig, seed: int) -> "MlpPolicy":
        """Create a policy with random weights from `seed`.

        The global random state is left unchanged.
        """
        # The global state stays, so that creating a policy does not change what else a program
        # draws.
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return cls(config, MlpNetwork(config))

    @classmethod
    def load(cls, folder: Path) -> "MlpPolicy":
        """Read a checkpoint that `save` wrote.

        Raises: CheckpointError naming what is missing, unknown or damaged.
        """
        try:
            config = msgspec.json.decode((folder / CONFIG_FILE).read_bytes(), type=MlpConfig)
            tensors, files = read_weights(folder), companion_files(folder)
        except (OSError, ValueError, RecursionError) as error:
            # ValueError: not JSON, or not text
            raise CheckpointError(
                f"{folder} is not an MLP policy's checkpoint: {CONFIG_FILE} cannot be read: "
                f"{error}; choose another one."
            ) from error
        # Its random weights are replaced at once by those of the file, whose names and shapes
        # have to fit.
        policy = cls(config, cls.create(config, seed=0).network, files)
        policy.load_checkpoint_tensors(tensors)
        return policy

    def describe(self) -> str:
        """Describe in one line how it acts."""
        config = self.config
        return (
            f"MLP: sees a state of {config.state_size} numbers, decides {config.chunk_size} x "
            f"{config.action_dim} numbers, each one of {config.num_bins} values"
        )

    def save(self, folder: Path) -> None:
        """Write `config.json` and `model.safetensors` to a new folder, whole or not at all.

        Raises: CheckpointError.
        """
        save_folder(folder, self.checkpoint_tensors(), self.checkpoint_files())

    def copy(self) -> "MlpPolicy":
        """Return the same policy with its own copy of the weights."""
        return MlpPolicy(self.config, copy.deepcopy(self._network), self._files)

    @property
    def network(self) -> MlpNetwork:
        """The network, which holds the parameters."""
        return self._network

    @property
    def token_ids(self) -> range:
        """Ids of the bins."""
        return range(self.config.num_bins)

    @property
    def feature_size(self) -> int:
        """Width of the last hidden layer."""
        return self.config.hidden[-1]

    def prepare(self, observations: Sequence[Observation]) -> Tensor:
        """Return states float32 [B, D].

        Raises: ValueError for an observation without a `state` of that length.
        """
        require_dicts(observations)
        states = [
            np.asarray(observation.get("state", ()), np.float32) for observation in observations
        ]
        for state in states:
            if state.shape != (self.config.state_size,):
                raise ValueError(
                    f"observation['state'] is {list(state.shape)}, expected "
                    f"[{self.config.state_size}]; set MlpConfig.state_size to the length of the "
                    "environment's state."
                )
        return torch.from_numpy(np.stack(states))

    def sample(self, batch: Tensor, samplings: Sequence[Sampling]) -> SampledTokens:
        """Sample bins int64 [B, T]."""
        logits = self._network(to_device(batch, self._device))
        return SampledTokens(*choose_tokens(logits, samplings))

    def log_probs(
        self, batch: Tensor, tokens: Tensor, temperatures: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return log-probs and entropies of the given bins, float32 [B, T] each."""
        batch, tokens, temperatures = (
            to_device(given, self._device) for given in (batch, tokens, temperatures)
        )
        log_probs = tempered_log_probs(self._network(batch), temperatures)
        return log_probs.gather(-1, tokens[..., None])[..., 0], entropy(log_probs)

    def features(self, batch: Tensor) -> Tensor:
        """Return the output of the last hidden layer, [B, feature_size]."""
        return self._network.features(to_device(batch, self._device))

    def encode(self, actions: np.ndarray) -> np.ndarray:
        """Map actions float32 [B, H, A] to the nearest bins, int64 [B, T]."""
        expected = (self.config.chunk_size, self.config.action_dim)
        if actions.ndim != 3 or actions.shape[1:] != expected:
            raise ValueError(
                f"actions are {list(actions.shape)}, expected [B, {expected[0]}, {expected[1]}]."
            )
        # In float64: float32 would decide ties between two bins by rounding.
        distance = np.abs(actions[..., None].astype(np.float64) - self._bins)
        nearest: np.ndarray = distance.argmin(axis=-1)
        return nearest.reshape(len(actions), -1)

    def decode(self, tokens: np.ndarray) -> np.ndarray:
        """Map bins int64 [B, T] to actions float32 [B, H, A], in the environment's units."""
        grid = tokens.reshape(len(tokens), self.config.chunk_size, self.config.action_dim)
        actions: np.ndarray = self._bins[np.arange(self.config.action_dim), grid]
        return actions.astype(np.float32)

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """Return every parameter by name; views, not copies."""
        return dict(self._network.state_dict())

    def checkpoint_files(self) -> Mapping[str, bytes]:
        """Return `config.json`, and the other small files of the folder that was loaded."""
        config = msgspec.json.format(msgspec.json.encode(self.config), indent=1)
        return {**self._files, CONFIG_FILE: config}

    def load_checkpoint_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy tensors into the network; every name and shape has to match."""
        try:
            self._network.load_state_dict(dict(tensors))
        except RuntimeError as error:
            raise CheckpointError(f"these tensors do not fit this MLP: {error}") from error

    @property
    def _device(self) -> torch.device:
        return next(self._network.parameters()).device


def load_mlp(folder: Path, format: object, device: torch.device) -> MlpPolicy:
    """Load a folder for `vla_rl.models.families`; its files say everything, so no format is read."""
    policy = MlpPolicy.load(folder)
    policy.network.to(device)
    return policy
