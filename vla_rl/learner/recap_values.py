"""Values of stored control steps, learnt from the returns that followed them (RECAP).

    frozen features [N, F] ─► LayerNorm ─► MLP ─► logits over bins of [-1, 0] ─► mean = value

Episodes are divided into folds; the values of each come from a network that was trained on the others.
"""

import random
from typing import NamedTuple

import torch
from torch import Tensor, nn

from vla_rl.algorithms.off_policy import bin_loss, expected_values, spread_over_bins
from vla_rl.learner.config import RecapValueConfig
from vla_rl.types import derive_seed

LOW, HIGH = -1.0, 0.0
"""Least and largest normalised return."""


class RecapValues(NamedTuple):
    """Values of N control steps, and how good they are.

    Attributes:
        values: float32 [N].
        explained: share of the returns' variance that they explain; NaN if all returns are equal.
    """

    values: Tensor
    explained: float


class ReturnNetwork(nn.Module):
    """A distribution over normalised returns for each row of features.

    Args:
        feature_size: F.
        config: width and number of bins.
    """

    def __init__(self, feature_size: int, config: RecapValueConfig) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.LayerNorm(feature_size),
            nn.Linear(feature_size, config.width),
            nn.GELU(),
            nn.Linear(config.width, config.width),
            nn.GELU(),
            nn.Linear(config.width, config.bins),
        )

    def forward(self, features: Tensor) -> Tensor:
        """Return logits, float32 [B, bins], of features float32 [B, F]."""
        logits: Tensor = self.layers(features)
        return logits


def fit_values(
    features: Tensor, returns: Tensor, episodes: Tensor, config: RecapValueConfig, seed: int
) -> RecapValues:
    """Learn the values of stored control steps.

    Args:
        features: float32 [N, F], of a frozen policy.
        returns: float32 [N], in [-1, 0].
        episodes: int64 [N], number of the episode of each step.
        config: the network and its training.
        seed: of the folds, the initial weights and the order.

    Returns: values, on the device of `features`. Raises: ValueError for features or returns that are not
    finite, or for no row.
    """
    if len(features) == 0 or not bool(
        torch.isfinite(features).all() & torch.isfinite(returns).all()
    ):
        raise ValueError(
            f"{len(features)} rows of features, or NaN among them or the returns; expected finite "
            "numbers of at least one control step."
        )
    numbers = sorted(set(episodes.tolist()))
    random.Random(derive_seed(seed, "folds")).shuffle(numbers)
    num_folds = min(config.folds, len(numbers))
    values = torch.zeros_like(returns)
    for fold in range(num_folds):
        held = torch.tensor(numbers[fold::num_folds], device=episodes.device)
        is_held = torch.isin(episodes, held)
        learnt = ~is_held if num_folds > 1 else is_held
        network = _train(features[learnt], returns[learnt], config, derive_seed(seed, "fold", fold))
        with torch.inference_mode():
            logits = network(features[is_held])
        values[is_held] = expected_values(logits, low=LOW, high=HIGH).clone()
    spread = float(returns.var(correction=0))
    left = float((returns - values).var(correction=0))
    return RecapValues(values, 1.0 - left / spread if spread > 1e-12 else float("nan"))


def _train(features: Tensor, returns: Tensor, config: RecapValueConfig, seed: int) -> ReturnNetwork:
    # torch's own random state is that of the policy's training, which must not depend on this
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed % 2**63)
        network = ReturnNetwork(features.shape[1], config).to(features.device)
    order = torch.Generator().manual_seed(derive_seed(seed, "order") % 2**63)
    optimizer = torch.optim.AdamW(network.parameters(), lr=config.lr)
    for _ in range(config.updates):
        drawn = torch.randint(len(features), (config.batch,), generator=order)
        rows = drawn.to(features.device)
        targets = spread_over_bins(returns[rows], config.bins, low=LOW, high=HIGH)
        optimizer.zero_grad()
        torch.autograd.backward(bin_loss(network(features[rows]), targets))
        optimizer.step()
    return network.eval()
