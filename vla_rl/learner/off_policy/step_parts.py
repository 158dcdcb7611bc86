"""Parts of a gradient step: its random numbers, the head's actions, values of actions and states."""

from typing import Any, TypeAlias

import torch
from torch import Tensor

from vla_rl.algorithms.off_policy import draw_members
from vla_rl.learner.off_policy.batches import State
from vla_rl.learner.off_policy.critics import ActionCritics, StateValues
from vla_rl.learner.off_policy.training import HeadTraining

StepMetrics: TypeAlias = dict[str, Tensor | float]
"""Metrics of a step, float32 [] on the device, or numbers."""


class Draws:
    """Random numbers of one gradient step.

    Args:
        seed: the step's own.
        device: device that they are copied to.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self._seed, self._device = seed % 2**63, device
        self._generator = torch.Generator().manual_seed(self._seed)

    def normal(self, *shape: int) -> Tensor:
        """Draw standard normal numbers."""
        return torch.randn(*shape, generator=self._generator).to(self._device)

    def uniform(self, *shape: int) -> Tensor:
        """Draw numbers in [0, 1)."""
        return torch.rand(*shape, generator=self._generator).to(self._device)

    def members(self, num: int, drawn: int) -> Tensor | None:
        """Draw different critics; None: all."""
        return None if drawn == num else draw_members(num, drawn, seed=self._seed)


def act(actor: Any, state: State) -> Any:
    """Return the distribution of the head's actions."""
    return actor.distribution(state.features, state.proprio, state.reference)


def value_actions(critics: ActionCritics, state: State, action: Tensor) -> Tensor:
    """Return values [E, N]."""
    found: Tensor = critics(state.features, state.proprio, action)
    return found


def get_critics(training: HeadTraining) -> tuple[ActionCritics, ActionCritics]:
    """Return critics and target critics."""
    assert training.critics is not None
    assert training.target_critics is not None
    return training.critics, training.target_critics


def draw_actions(training: HeadTraining, state: State, draws: Draws) -> tuple[Tensor, Tensor]:
    """Draw the actor's actions [N, A] with their log-densities [N]."""
    distribution = act(training.actor, state)
    action, log_prob = distribution.sample_with_log_prob(draws.normal(*distribution.mean.shape))
    return action, log_prob.sum(-1)


def value_states(network: StateValues | None, state: State) -> Tensor:
    """Return values of states, [N]."""
    assert network is not None
    found: Tensor = network(state.features, state.proprio)
    return found
