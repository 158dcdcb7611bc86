"""The distribution of a head's action: a Gaussian, squashed if the action has a limit.

    residual           a ~ N(mean, std)
    noise, tokens      a = limit * tanh(u),  u ~ N(mean, std)        (SAC: Haarnoja et al. 2018, arXiv:1812.05905)

The numbers of an action are independent of each other, and each has its own density. Where the control steps
of a chunk share their noise, the first step's numbers decide all others, so that the density is theirs.
"""

import math
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

LARGEST_TANH: Final = 1.0 - 1e-6
"""Closest to 1 that an action's share of its limit is taken to be; atanh of 1 is infinite."""


@dataclass(frozen=True)
class SteeringDistribution:
    """Distributions of N actions of A numbers.

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
