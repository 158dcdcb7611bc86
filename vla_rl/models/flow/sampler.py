"""Chains of a flow policy from noise to a chunk of actions, one stochastic step in each.

    noise ─ode─► x_1 ─ode─► x_2 ─Flow-SDE─► x_3 ─ode─► x_4 = chunk       K = 4; here step 2 is stochastic
                             │               │
                        state before     next state: what the decision's density is of

The index of the stochastic step, the initial noise and that step's noise come from the decision's own
seed, on the CPU: a decision is the same in every batch and on every device. Rows of one batch differ in
their stochastic step; a greedy row has none.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

import torch
from torch import Tensor

from vla_rl.engines.device_lane import to_device
from vla_rl.engines.sampling import seeded_uniforms, to_normal
from vla_rl.models.flow.transitions import Schedule, Transition
from vla_rl.types import Sampling

Velocity: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""Velocity float32 [N, H, P] at states float32 [N, H, P] and times float32 [N]."""

NO_STEP: Final = -1
"""Step index of a row without a stochastic step."""


@dataclass(frozen=True)
class Draws:
    """All chance of N decisions.

    Attributes:
        step: int64 [N], the stochastic step, or, without noise, the one that is kept for losses of
            predictions; `NO_STEP` for a greedy row.
        noise: float32 [N, H, P], standard normal: where the chain starts.
        step_noise: float32 [N, H, P], standard normal: added in the stochastic step.
    """

    step: Tensor
    noise: Tensor
    step_noise: Tensor

    @classmethod
    def from_seeds(
        cls, samplings: Sequence[Sampling], shape: tuple[int, int], schedule: Schedule
    ) -> "Draws":
        """Draw for decisions with chunks of `shape` (H, P), each from its own `Sampling.seed`."""
        size = shape[0] * shape[1]
        uniforms = seeded_uniforms(samplings, 1 + 2 * size)
        step = (uniforms[:, 0] * schedule.num_kept).long()
        has_step = torch.tensor([not sampling.greedy for sampling in samplings])
        normal = to_normal(uniforms[:, 1:]).view(-1, 2, *shape)
        return cls(torch.where(has_step, step, NO_STEP), normal[:, 0], normal[:, 1])

    @classmethod
    def deterministic(cls, noise: Tensor) -> "Draws":
        """Return draws of chains that start from `noise`, float32 [N, H, P], and have no stochastic step."""
        step = torch.full((len(noise),), NO_STEP, device=noise.device)
        return cls(step, noise, torch.zeros_like(noise))

    def to(self, device: torch.device) -> "Draws":
        """Return the same draws on a device."""
        return Draws(
            to_device(self.step, device),
            to_device(self.noise, device),
            to_device(self.step_noise, device),
        )


class Chain(NamedTuple):
    """N finished chains.

    Attributes:
        chunk: float32 [N, H, P], the end of each chain, at time 0.
        state_before: float32 [N, H, P], the state before the stochastic step; without one, the
            chain's start.
        next_state: float32 [N, H, P], the state after the stochastic step; without one, the chunk.
        velocity: float32 [N, H, P], the velocity in the stochastic step; zeros without one.
        transition: the distribution that `next_state` was drawn from; without a stochastic step,
            its standard deviation is 0 and its mean the chunk.
    """

    chunk: Tensor
    state_before: Tensor
    next_state: Tensor
    velocity: Tensor
    transition: Transition


def run_chain(
    velocity: Velocity, draws: Draws, schedule: Schedule, noise_scale: Tensor | None = None
) -> Chain:
    """Run all steps of N chains.

    Args:
        velocity: the policy, on the observations of the N rows.
        draws: on the device of the policy.
        schedule: how stochastic steps are taken; all others follow the deterministic rule.
        noise_scale: float32 [N], a factor of the standard deviations; None for 1.
    """
    plain = Schedule("ode", schedule.num_steps)
    x = state_before = next_state = mean = draws.noise
    std, kept = torch.zeros(len(x), device=x.device), torch.zeros_like(x)
    for number in range(schedule.num_steps):
        step = torch.full_like(draws.step, number)
        v = velocity(x, schedule.times(step))
        moved = plain.transition(x, v, step).mean
        explored = scale_noise(schedule.transition(x, v, step), noise_scale)
        reached = explored.mean + explored.std[:, None, None] * draws.step_noise
        is_drawn = draws.step == number
        at_step = is_drawn[:, None, None]
        state_before = torch.where(at_step, x, state_before)
        next_state = torch.where(at_step, reached, next_state)
        mean = torch.where(at_step, explored.mean, mean)
        kept = torch.where(at_step, v, kept)
        std = torch.where(is_drawn, explored.std, std)
        x = torch.where(at_step, reached, moved)
    has_none = (draws.step == NO_STEP)[:, None, None]
    return Chain(
        chunk=x,
        state_before=state_before,
        next_state=torch.where(has_none, x, next_state),
        velocity=kept,
        transition=Transition(torch.where(has_none, x, mean), std),
    )


def scale_noise(transition: Transition, scale: Tensor | None) -> Transition:
    """Multiply the standard deviations by a factor for each row, float32 [N]; None leaves them."""
    return transition if scale is None else Transition(transition.mean, transition.std * scale)
