"""Real-time chunking: chunks that continue the plan which a robot follows while the policy decides
(Black et al. 2025, arXiv:2506.07339).

    plan    p0 p1 p2 p3 | p4 p5 p6 p7 |              rows of the previous chunk from now on
    chunk   p0 p1 p2 p3 | c4 c5 c6 c7 | c8 c9 ...    delay 4
            frozen: they  guided: less  free
            run meanwhile  and less

A policy that takes 80 ms for a decision at 50 Hz decides from what it saw four control steps ago. A chunk that is
drawn anew starts anywhere; switching to it in its fifth row is a jump. Here every step of the chain is
corrected by the gradient of its estimate's distance from the plan (paper, eq. 2 to 5, algorithm 1), which
needs no training.
"""

import math
from typing import Final

import numpy as np
import torch
from torch import Tensor

from vla_rl.models.flow.sampler import NO_STEP, Chain, Draws, Velocity, run_chain
from vla_rl.models.flow.transitions import Schedule, Transition

LARGEST_GUIDANCE: Final = 5.0
"""Largest weight of a correction, beta in the paper: without it, the first step would have an infinite one."""


def weigh_plan(num_rows: int, delay: int, horizon: int) -> np.ndarray:
    """Return how strongly each row of a new chunk has to follow a plan, float32 [H] in [0, 1].

    1 for rows that run while the policy decides, and falling exponentially over the other rows of
    the plan (paper, eq. 5); below 1 there, and 0 beyond the plan.

    Args:
        num_rows: rows of the plan, at least `delay`.
        delay: rows that run while the policy decides.
        horizon: rows of a chunk, H.
    """
    rows = np.arange(horizon)
    left = (num_rows - rows) / (num_rows - delay + 1)
    falling = left * np.expm1(left) / (math.e - 1.0)
    weights = np.where(rows < delay, 1.0, np.where(rows < num_rows, falling, 0.0))
    return weights.astype(np.float32)


def guidance_weight(time: float) -> float:
    """Return the weight of the correction at a time in (0, 1], at most `LARGEST_GUIDANCE` (paper, eq. 2 and 4;
    their time runs from 0 to 1).
    """
    kept = 1.0 - time
    if kept == 0.0:
        return LARGEST_GUIDANCE
    return min(LARGEST_GUIDANCE, (kept**2 + time**2) / (time * kept))


def run_guided_chain(
    velocity: Velocity, noise: Tensor, schedule: Schedule, planned: Tensor, weight: Tensor
) -> Tensor:
    """Run deterministic chains that are guided by plans; return their ends, float32 [N, H, P].

    Rows with a weight of 1 come out as they were planned. A row of N without any weight is that of
    the plain chain.

    Args:
        velocity: the policy, differentiable by the state.
        noise: float32 [N, H, P], where the chains start.
        schedule: number of steps.
        planned: float32 [N, H, P], rows of the plans as the network sees them.
        weight: float32 [N, H, P], 0 in padded dimensions.
    """
    x = noise.clone()  # a tensor of an inference pass has no gradient
    for number in range(schedule.num_steps):
        time = 1.0 - number / schedule.num_steps
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            v = velocity(x, torch.full((len(x),), time, device=x.device))
            estimate = x - time * v
            error = weight * (planned - estimate.detach())
            (correction,) = torch.autograd.grad(estimate, x, error)
        x = x.detach() - (v.detach() - guidance_weight(time) * correction) / schedule.num_steps
    return torch.where(weight == 1.0, planned, x)


def continue_plans(
    velocity: Velocity,
    draws: Draws,
    schedule: Schedule,
    temperatures: Tensor,
    planned: Tensor,
    weight: Tensor,
) -> tuple[Chain, Tensor]:
    """Let the decisions that have a plan continue it; return all chains, and the stochastic step of each.

    Decisions with a plan have no stochastic step, hence no density: nothing is learnt from them.

    Args:
        velocity, draws, schedule, temperatures: as in `run_chain`.
        planned, weight: as in `run_guided_chain`; weights of 0 where there is no plan.
    """
    has_plan = (weight > 0.0).flatten(1).any(1)
    end = run_guided_chain(velocity, draws.noise, schedule, planned, weight)
    silent = Transition(end, torch.zeros(len(end), device=end.device))
    guided = Chain(end, draws.noise, end, torch.zeros_like(end), silent)
    step = torch.where(has_plan, NO_STEP, draws.step)
    if bool(has_plan.all()):
        return guided, step
    plain = run_chain(velocity, draws, schedule, temperatures)
    at = has_plan[:, None, None]
    return (
        Chain(
            torch.where(at, guided.chunk, plain.chunk),
            torch.where(at, guided.state_before, plain.state_before),
            torch.where(at, guided.next_state, plain.next_state),
            torch.where(at, guided.velocity, plain.velocity),
            Transition(
                torch.where(at, silent.mean, plain.transition.mean),
                torch.where(has_plan, silent.std, plain.transition.std),
            ),
        ),
        step,
    )
