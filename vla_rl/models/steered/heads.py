"""The network of a steered policy: an MLP over features of a frozen base.

    features [N, Z] ─► LayerNorm ─┐
    proprio [N, P] ───────────────┼─► MLP ─► raw [N, A] ─► reference + scale * tanh(raw)    residual
    reference [N, A] ─────────────┘                   └──► raw, squashed to the limit       noise, tokens

A new residual head corrects nothing: its last layer begins at 0, so its mean is the reference, bit for bit.

An action is drawn from a Gaussian around the head's output, squashed if the action has a limit:

    residual           a ~ N(mean, std)
    noise, tokens      a = limit * tanh(u),  u ~ N(mean, std)        (SAC: Haarnoja et al. 2018, arXiv:1812.05905)
"""

import itertools
import math
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from vla_rl.errors import ConfigError
from vla_rl.models.steered.config import HeadSizes, SteeringConfig

LARGEST_TANH: Final = 1.0 - 1e-6
"""Closest to 1 that an action's share of its limit is taken to be; atanh of 1 is infinite."""


@dataclass(frozen=True)
class SteeringDistribution:
    """Distributions of N actions of A numbers, which are independent of each other.

    Each number has its own density. Where the control steps of a chunk share their noise, the first step's
    numbers decide all others, so that the density is theirs.

    Attributes:
        mean: float32 [N, A], of the Gaussian.
        log_std: float32 [N, A], of the Gaussian.
        limit: largest magnitude of an action; None if it is the Gaussian's own number.
        num_shared: numbers of noise that repeat along an action, those of one control step; None: none do. The
            later numbers then have the density 1 and the entropy 0.
    """

    mean: Tensor
    log_std: Tensor
    limit: float | None = None
    num_shared: int | None = None

    @property
    def mode(self) -> Tensor:
        """The greedy action, float32 [N, A]: the mean, squashed if there is a limit."""
        return self._squash(self.mean)

    def sample(self, noise: Tensor) -> Tensor:
        """Return actions float32 [N, A] from standard normal noise [N, A], with a gradient to mean and deviation."""
        return self._squash(self._move(noise))

    def sample_with_log_prob(self, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Return actions and their log-densities, float32 [N, A] each, with a gradient, as SAC needs both."""
        latent = self._move(noise)
        return self._squash(latent), self._density(latent)

    def log_prob(self, action: Tensor) -> Tensor:
        """Return log-densities of given actions, float32 [N, A].

        With a limit, actions nearer to it than 1e-6 of it count as that far away.
        """
        if self.limit is None:
            return self._density(action)
        share = (action / self.limit).clamp(-LARGEST_TANH, LARGEST_TANH)
        return self._density(torch.atanh(share))

    @property
    def entropy(self) -> Tensor:
        """Entropy of the Gaussian, before it is squashed, float32 [N, A], in nats."""
        return self._count(self.log_std + 0.5 * (1.0 + math.log(2.0 * math.pi)))

    def tempered(self, temperatures: Tensor) -> "SteeringDistribution":
        """Return the same with standard deviations times a temperature for each row, float32 [N]."""
        log_std = self.log_std + temperatures.float().log()[:, None]
        return replace(self, log_std=log_std)

    def _move(self, noise: Tensor) -> Tensor:
        """Return numbers before squashing; shared noise is taken from the first control step."""
        if self.num_shared is not None:
            noise = noise[:, : self.num_shared].repeat(1, noise.shape[1] // self.num_shared)
        return self.mean + self.log_std.exp() * noise

    def _count(self, values: Tensor) -> Tensor:
        """Return values [N, A] with zeros for numbers that those before them decide."""
        if self.num_shared is None:
            return values
        return values.index_fill(
            1, torch.arange(self.num_shared, values.shape[1], device=values.device), 0.0
        )

    def _squash(self, latent: Tensor) -> Tensor:
        return latent if self.limit is None else self.limit * torch.tanh(latent)

    def _density(self, latent: Tensor) -> Tensor:
        standard = (latent - self.mean) * (-self.log_std).exp()
        density = -0.5 * standard.square() - self.log_std - 0.5 * math.log(2.0 * math.pi)
        if self.limit is None:
            return self._count(density)
        # log(1 - tanh(u)^2) in a form that does not round to log(0) for large u
        slope = 2.0 * (math.log(2.0) - latent - functional.softplus(-2.0 * latent))
        return self._count(density - slope - math.log(self.limit))


LOG_STD_RANGE: Final = (-5.0, 2.0)
"""Smallest and largest logarithm of a learnt standard deviation."""

STEERING_GAIN: Final = 0.01
"""Gain of the initial weights of a head that steers: its mean begins near 0, the base's most typical choice."""


class FollowsHead(Protocol):
    """Something that has to be on the device of a head, but does not belong to its parameters."""

    def move_to(self, device: torch.device) -> None:
        """Move to a device."""
        ...


class SteeringHead(nn.Module):
    """The head alone, with weights from torch's global generator.

    `is_on` is a parameter without a gradient, so that whether the head acts travels with its weights: to engines,
    into checkpoints, to other hosts.
    """

    def __init__(
        self, config: SteeringConfig, sizes: HeadSizes, follower: FollowsHead | None = None
    ) -> None:
        super().__init__()
        self.config, self.sizes, self._follower = config, sizes, follower
        num_inputs = sizes.features + sizes.proprio + (0 if config.steers else sizes.action)
        self.norm = nn.LayerNorm(sizes.features)
        widths = (num_inputs, *config.hidden)
        layers = [nn.Linear(width, next_width) for width, next_width in itertools.pairwise(widths)]
        self.body = nn.Sequential(*(module for layer in layers for module in (layer, nn.ReLU())))
        num_chosen = sizes.action_dim if config.is_one_step_repeated else sizes.action
        self.mean = nn.Linear(widths[-1], num_chosen)
        nn.init.zeros_(self.mean.bias)
        if config.steers:
            nn.init.orthogonal_(self.mean.weight, STEERING_GAIN)
        else:
            nn.init.zeros_(self.mean.weight)
        self.log_std = nn.Linear(widths[-1], num_chosen) if config.learns_std else None
        if self.log_std is not None:
            nn.init.zeros_(self.log_std.weight)
            nn.init.constant_(self.log_std.bias, math.log(config.std))
        self.is_on = nn.Parameter(torch.ones(()), requires_grad=False)
        # Not persistent: the scale is in config.json, and two sources of one fact may differ.
        self.register_buffer("scale", _repeat_scale(config, sizes), persistent=False)

    @property
    def limit(self) -> float | None:
        """Largest magnitude of an action; None if the head's action is the chunk itself."""
        return self.config.limit if self.config.steers else None

    @property
    def _num_shared(self) -> int | None:
        is_shared = self.config.shares_noise or self.config.is_one_step_repeated
        return self.sizes.action_dim if is_shared else None

    def forward(
        self, features: Tensor, proprio: Tensor, reference: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return mean and log standard deviation of the Gaussian, float32 [N, A] each.

        If there is a `limit`, the Gaussian is that before squashing; `distribution` knows of both.
        """
        hidden = self.hidden(features, proprio, reference)
        raw = self.mean(hidden).float()
        if self.log_std is None:
            log_std = torch.full_like(raw, math.log(self.config.std))
        else:
            log_std = self.log_std(hidden).float().clamp(*LOG_STD_RANGE)
        if self.config.steers:
            num_repeats = self.sizes.action // raw.shape[1]
            return raw.repeat(1, num_repeats), log_std.repeat(1, num_repeats)
        change = self.get_buffer("scale") * torch.tanh(raw)
        return (reference + change if self.config.corrects_reference else change), log_std

    def distribution(
        self, features: Tensor, proprio: Tensor, reference: Tensor
    ) -> SteeringDistribution:
        """Return the distribution of actions for features [N, Z], proprio [N, P], references [N, A]."""
        mean, log_std = self(features, proprio, reference)
        return SteeringDistribution(mean, log_std, self.limit, self._num_shared)

    @property
    def num_free(self) -> int:
        """Numbers of an action that do not follow from others; minus it is SAC's usual target entropy."""
        return self._num_shared or self.sizes.action

    def make_base_distribution(self, reference: Tensor) -> SteeringDistribution:
        """Return the distribution that decisions of a head that is off are recorded under.

        Numbers that steer are standard normal, as the base draws them; chunks are taken as drawn around the
        reference [N, A] with the configured deviation.
        """
        if self.config.steers:
            return SteeringDistribution(reference, torch.zeros_like(reference))
        log_std = torch.full_like(reference, math.log(self.config.std))
        return SteeringDistribution(reference, log_std)

    def hidden(self, features: Tensor, proprio: Tensor, reference: Tensor) -> Tensor:
        """Return the last hidden layer, [N, F]."""
        dtype = self.norm.weight.dtype
        read = [self.norm(features.to(dtype)), proprio.to(dtype)]
        if not self.config.steers:
            read.append(reference.to(dtype))
        hidden: Tensor = self.body(torch.cat(read, -1))
        return hidden

    def to(self, *args: Any, **kwargs: Any) -> "SteeringHead":
        """Move the head, and the frozen base to the same device.

        Recipes move a policy by its network, and a base elsewhere could not compute the head's inputs.
        """
        super().to(*args, **kwargs)
        if self._follower is not None:
            self._follower.move_to(self.norm.weight.device)
        return self


def _repeat_scale(config: SteeringConfig, sizes: HeadSizes) -> Tensor:
    """Return the scale of each number of an action, float32 [A]; ones for a head that steers."""
    if config.steers:
        return torch.ones(sizes.action)
    num_given = len(config.scale)
    if num_given not in (1, sizes.action_dim):
        raise ConfigError(
            f"scale has {num_given} numbers, expected 1, or {sizes.action_dim}: one for each dimension of a "
            "control step of this base"
        )
    each = torch.tensor(config.scale, dtype=torch.float32).expand(sizes.action_dim)
    return each.repeat(sizes.action // sizes.action_dim)
