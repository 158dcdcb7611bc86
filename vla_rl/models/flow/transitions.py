"""Transitions of a flow's chain from noise to actions: means, standard deviations, densities.

Step i of K begins at time t = 1 - i / K and ends at t - delta, delta = 1 / K. A velocity v gives an
estimate of the actions, a = x - t v, and one of the noise, n = x + (1 - t) v. The next state has the mean
w_a a + w_n n and the standard deviation s:

    method     w_a              w_n                                       s
    ode        1 - (t - delta)  t - delta                                 0
    flow_sde   1 - (t - delta)  (t - delta) - sigma^2 delta / (2 t)       sigma sqrt(delta)
    flow_cps   1 - (t - delta)  (t - delta) cos(pi eta / 2)               (t - delta) sin(pi eta / 2)

with sigma = eta sqrt(t / (1 - t)); in step 0, where t = 1, the root takes 1 - t from step 1. "flow_sde" is
Flow-GRPO's equation (Liu et al. 2025, arXiv:2505.05470, eq. 9 and 12), "flow_cps" coefficients-preserving
sampling (Wang & Yu 2025, arXiv:2509.05952). The second term of w_n is Flow-SDE's correction of the drift:
with it, states are distributed as in the deterministic chain, up to the length of a step, so that the
policy that explores is the one that acts. "flow_cps" keeps the total noise of a state instead.

Everything here is pure, and row by row: N decisions, each with its own step.
"""

import math
from dataclasses import dataclass
from functools import cache
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from vla_rl.engines.device_lane import to_device

Method: TypeAlias = Literal["ode", "flow_sde", "flow_cps"]


class Transition(NamedTuple):
    """The distribution of the next state of N chains, independent for each number.

    Attributes:
        mean: float32 [N, H, P].
        std: float32 [N]; 0 if the step is deterministic.
    """

    mean: Tensor
    std: Tensor


@dataclass(frozen=True)
class Schedule:
    """K steps of equal length, and how they are taken.

    Attributes:
        method: the rule of the means and standard deviations.
        num_steps: K.
        noise_level: eta; "ode" ignores it.

    Example:
        Schedule("flow_sde", num_steps=4, noise_level=0.5).transition(x, v, step)
    """

    method: Method
    num_steps: int
    noise_level: float = 0.0

    def times(self, step: Tensor) -> Tensor:
        """Return the times at which steps begin, float32 of the shape of `step`."""
        # By division in float32 on the device: every row, batch and device gets the same bits.
        return 1.0 - step.float() / self.num_steps

    def transition(self, x: Tensor, velocity: Tensor, step: Tensor) -> Transition:
        """Return the distribution of the states after `step`.

        Args:
            x: float32 [N, H, P], the states before.
            velocity: float32 [N, H, P], at x and `times(step)`.
            step: int64 [N], 0 to K - 1.
        """
        x_weight, velocity_weight, std = _weights_on(x.device, self)[:, step]
        mean = x_weight[:, None, None] * x + velocity_weight[:, None, None] * velocity
        return Transition(mean, std)

    @property
    def num_stochastic(self) -> int:
        """Number of steps that add noise: the first ones."""
        return sum(std > 0.0 for _, _, std in self.step_weights())

    @property
    def num_kept(self) -> int:
        """Number of steps, the first ones, one of which a decision keeps: those that add noise; all if
        none does.
        """
        return self.num_stochastic or self.num_steps

    def step_weights(self) -> list[tuple[float, float, float]]:
        """Return for each step the weights of x and of the velocity in the mean, and the standard
        deviation, in float64.
        """
        rows = []
        for step in range(self.num_steps):
            time, (action, noise, std) = 1.0 - step / self.num_steps, self._mixture(step)
            # a = x - t v and n = x + (1 - t) v, collected by x and v
            rows.append((action + noise, -time * action + (1.0 - time) * noise, std))
        return rows

    def _mixture(self, step: int) -> tuple[float, float, float]:
        """Return w_a, w_n and s."""
        delta = 1.0 / self.num_steps
        time, later = 1.0 - step * delta, (self.num_steps - step - 1) * delta
        if self.method == "flow_cps":
            angle = 0.5 * math.pi * self.noise_level
            return 1.0 - later, later * math.cos(angle), later * math.sin(angle)
        if self.method == "ode" or self.noise_level == 0.0:
            return 1.0 - later, later, 0.0
        # The root has a pole at t = 1. With one step there is no second time to take 1 - t from.
        variance = self.noise_level**2 * time / max(1.0 - time, delta)
        return 1.0 - later, later - variance * delta / (2.0 * time), math.sqrt(variance * delta)


@cache
def _weights_on(device: torch.device, schedule: Schedule) -> Tensor:
    """Return `step_weights` as float32 [3, K], uploaded once."""
    # A learner may read a tensor first made while acting, and autograd refuses inference tensors.
    with torch.inference_mode(False):
        weights = torch.tensor(schedule.step_weights(), dtype=torch.float32)
        return to_device(weights.T.contiguous(), device)


def log_density(state: Tensor, transition: Transition) -> Tensor:
    """Return the log-density of each number of a state after a transition, float32 [N, H, P].

    It is 0 where the transition is deterministic: such a step has no density.
    """
    std = transition.std[:, None, None]
    safe = torch.where(std > 0.0, std, 1.0)
    distance = (state - transition.mean) / safe
    density = -torch.log(safe) - 0.5 * math.log(2.0 * math.pi) - 0.5 * distance.square()
    return torch.where(std > 0.0, density, 0.0)


def entropy(transition: Transition) -> Tensor:
    """Return the differential entropy of each number, float32 [N]; 0 if a step is deterministic."""
    safe = torch.where(transition.std > 0.0, transition.std, 1.0)
    exact = 0.5 * math.log(2.0 * math.pi * math.e) + torch.log(safe)
    return torch.where(transition.std > 0.0, exact, 0.0)


def kl_divergence(mean: Tensor, reference_mean: Tensor, std: Tensor) -> Tensor:
    """Return the exact KL divergence of two policies in each number of a transition, [N, H, P].

        KL = (mean - reference mean)^2 / (2 s^2)

    Both policies start from the same state and take the same step, so their standard deviations are
    equal.

    Args:
        mean: float32 [N, H, P], of the policy.
        reference_mean: float32 [N, H, P], of the reference.
        std: float32 [N], above 0.
    """
    return 0.5 * ((mean - reference_mean) / std[:, None, None]).square()
