"""Kinds of a head's action: what it is over a base, and what the base does with it.

residual   the chunk itself, in units of about [-1, 1]                       A = C * D
noise      the first rows of a flow's first noise                            A = R * D
tokens     standard normal numbers, quantiles of the token distributions     A = C * D
"""

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec
import torch
from torch import Tensor

from vla_rl.engines.policy_model import SampledTokens
from vla_rl.errors import ConfigError
from vla_rl.models.steered.bases import FlowBase, FrozenBase, TokenBase
from vla_rl.models.steered.config import SteeringConfig
from vla_rl.types import Sampling


class Steering(Protocol):
    """One kind of action over one base."""

    def refer(self, read: Any, samplings: Sequence[Sampling]) -> Tensor:
        """Return what the head is shown of the base's decision, float32 [N, A]; zeros if nothing."""
        ...

    def express(self, read: Any, samplings: Sequence[Sampling], chosen: SampledTokens) -> Tensor:
        """Return a decision of the base alone as an action, float32 [N, A]."""
        ...

    def steer(self, read: Any, action: Tensor, samplings: Sequence[Sampling]) -> Tensor | None:
        """Return the base's tokens or numbers under an action; None if the action is the chunk."""
        ...


class ResidualSteering:
    """The head chooses the chunk; the base's greedy one is its reference."""

    def __init__(self, base: FrozenBase[Any, Any, Any], by_mean: bool) -> None:
        self._base, self._by_mean = base, by_mean

    def refer(self, read: Any, samplings: Sequence[Sampling]) -> Tensor:
        """Return the base's greedy chunk; that of a flow starts from the noise of the decision's seed."""
        greedy = [
            msgspec.structs.replace(each, greedy=True, by_mean=self._by_mean, temperature=1.0)
            for each in samplings
        ]
        return self._base.numbers(self._base.choose(read, greedy)).float()

    def express(self, read: Any, samplings: Sequence[Sampling], chosen: SampledTokens) -> Tensor:
        """Return the chosen chunk."""
        return self._base.numbers(chosen).float()

    def steer(self, read: Any, action: Tensor, samplings: Sequence[Sampling]) -> None:
        """Return nothing: the action is executed as it is."""
        return


class NoiseSteering:
    """The head chooses a flow's first noise (DSRL: Wagenmaker et al. 2025, arXiv:2506.15799)."""

    def __init__(self, base: FlowBase) -> None:
        self._base = base

    def refer(self, read: Any, samplings: Sequence[Sampling]) -> Tensor:
        """Return zeros: the base's chunk depends on the noise that is still to be chosen."""
        return torch.zeros(len(samplings), self._base.action_size, device=self._base.device)

    def express(self, read: Any, samplings: Sequence[Sampling], chosen: SampledTokens) -> Tensor:
        """Return the executed rows of the noise that the base drew."""
        return self._base.draw_noise(samplings).flatten(1)

    def steer(self, read: Any, action: Tensor, samplings: Sequence[Sampling]) -> Tensor:
        """Return the end of the chain from the chosen noise."""
        noise = action.view(len(action), self._base.chunk_size, self._base.action_dim)
        return self._base.choose_from_noise(read, noise, samplings)


class TokenSteering:
    """The head chooses a quantile of each token's distribution."""

    def __init__(self, base: TokenBase[Any, Any]) -> None:
        self._base = base

    def refer(self, read: Any, samplings: Sequence[Sampling]) -> Tensor:
        """Return zeros: a head that steers does not read a reference."""
        return torch.zeros(len(samplings), self._base.action_size, device=self._base.device)

    def express(self, read: Any, samplings: Sequence[Sampling], chosen: SampledTokens) -> Tensor:
        """Return the standard normal numbers of the base's own draw."""
        return self._base.find_quantiles(read, samplings)

    def steer(self, read: Any, action: Tensor, samplings: Sequence[Sampling]) -> Tensor:
        """Return the token ids at the quantiles."""
        return self._base.choose_quantiles(read, action)


def make_steering(config: SteeringConfig, base: FrozenBase[Any, Any, Any]) -> Steering:
    """Return the kind that a configuration names.

    Raises: ConfigError if the base cannot be steered in this way.
    """
    name = type(base.policy).__name__
    if config.reference_by_mean and not isinstance(base, TokenBase):
        raise ConfigError(
            f"reference_by_mean is set, but a {name} has no distributions of tokens; leave it out"
        )
    if config.kind == "residual":
        return ResidualSteering(base, config.reference_by_mean)
    if config.kind == "noise":
        if not isinstance(base, FlowBase):
            raise ConfigError(
                f"kind is 'noise', but a {name} starts from no noise; take a flow policy, or the kind tokens for "
                "a policy that has distributions of tokens"
            )
        return NoiseSteering(base)
    if not isinstance(base, TokenBase):
        raise ConfigError(
            f"kind is 'tokens', but a {name} has no distributions of tokens; take OpenVLA-OFT with tokens or an "
            "MLP, or the kind residual"
        )
    return TokenSteering(base)
