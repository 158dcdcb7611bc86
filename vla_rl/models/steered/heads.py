"""The network of a steered policy: an MLP over features of a frozen base.

    features [N, Z] ─► LayerNorm ─┐
    proprio [N, P] ───────────────┼─► MLP ─► raw [N, A] ─► reference + scale * tanh(raw)    residual
    reference [N, A] ─────────────┘                   └──► raw, squashed to the limit       noise, tokens

A new residual head corrects nothing: its last layer begins at 0, so its mean is the reference, bit for bit.
"""

import itertools
import math
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn

from vla_rl.errors import ConfigError
from vla_rl.models.steered.config import HeadSizes, SteeringConfig
from vla_rl.models.steered.distribution import SteeringDistribution

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
