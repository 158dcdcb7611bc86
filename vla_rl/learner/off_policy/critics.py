"""Networks that value actions and states of a frozen policy: ensembles of small MLPs, computed together.

    features [N, Z], proprio [N, P], action [N, A] ─► K × (linear, LayerNorm, ReLU) ─► Q [K, N]
    features [N, Z], proprio [N, P] ─────────────────► the same without an action ───► V [N]

All members of an ensemble are one batched product, so that ten critics take about the time of two.
"""

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from vla_rl.learner.off_policy.config import CriticNetworkConfig


class EnsembleLinear(nn.Module):
    """K linear layers with weights of their own: [K, N, in] to [K, N, out].

    Their weights are initialised as `torch.nn.Linear` initialises each.
    """

    def __init__(self, members: int, width: int, next_width: int) -> None:
        super().__init__()
        bound = 1.0 / math.sqrt(width)
        self.weight = nn.Parameter(torch.empty(members, width, next_width).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(members, 1, next_width).uniform_(-bound, bound))

    def forward(self, rows: Tensor) -> Tensor:
        """Return the rows of each member."""
        return torch.baddbmm(self.bias, rows, self.weight)


class EnsembleNorm(nn.Module):
    """LayerNorm with a scale and a shift for each member: [K, N, width] to the same."""

    def __init__(self, members: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(members, 1, width))
        self.bias = nn.Parameter(torch.zeros(members, 1, width))

    def forward(self, rows: Tensor) -> Tensor:
        """Return normalised rows."""
        return nn.functional.layer_norm(rows, rows.shape[-1:]) * self.weight + self.bias


class Ensemble(nn.Module):
    """K multilayer perceptrons with one output each."""

    def __init__(
        self, members: int, width: int, hidden: Sequence[int], *, layer_norm: bool
    ) -> None:
        super().__init__()
        self._members = members
        layers: list[nn.Module] = []
        for before, after in itertools.pairwise((width, *hidden)):
            layers.append(EnsembleLinear(members, before, after))
            if layer_norm:
                layers.append(EnsembleNorm(members, after))
            layers.append(nn.ReLU())
        self.layers = nn.Sequential(*layers, EnsembleLinear(members, hidden[-1], 1))

    def forward(self, rows: Tensor) -> Tensor:
        """Map rows [N, width] to values [K, N]."""
        values: Tensor = self.layers(rows.expand(self._members, *rows.shape))[..., 0]
        return values


class ActionCritics(nn.Module):
    """K estimates of the return after an action.

    Args:
        sizes: numbers of features, proprioception and action.
        members: K.
        config: widths and normalisation.
        seed: seed of the initial weights; the global random state stays as it is.
    """

    def __init__(
        self, sizes: tuple[int, int, int], members: int, config: CriticNetworkConfig, seed: int
    ) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.ensemble = Ensemble(
                members, sum(sizes), config.hidden, layer_norm=config.layer_norm
            )

    def forward(self, features: Tensor, proprio: Tensor, action: Tensor) -> Tensor:
        """Return values [K, N]."""
        values: Tensor = self.ensemble(torch.cat([_scale(features), proprio, action], -1))
        return values


class StateValues(nn.Module):
    """An estimate of the return from a state on; arguments are those of `ActionCritics`."""

    def __init__(self, sizes: tuple[int, int], config: CriticNetworkConfig, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.ensemble = Ensemble(1, sum(sizes), config.hidden, layer_norm=config.layer_norm)

    def forward(self, features: Tensor, proprio: Tensor) -> Tensor:
        """Return values [N]."""
        values: Tensor = self.ensemble(torch.cat([_scale(features), proprio], -1))[0]
        return values


class Temperature(nn.Module):
    """Weight of the entropy, trained as its logarithm."""

    def __init__(self, initial: float) -> None:
        super().__init__()
        self.log_value = nn.Parameter(torch.tensor(math.log(initial)))

    def forward(self) -> Tensor:
        """Return the weight, float32 []."""
        return self.log_value.exp()


def _scale(features: Tensor) -> Tensor:
    # features of a frozen network have any size, and beside them actions of order one would not count
    return nn.functional.layer_norm(features, features.shape[-1:])
