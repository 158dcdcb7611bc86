"""Measure what flow policies promise: `python -m benchmarks.flow_policies`.

The last line is JSON:

    ode_sde_marginal_sigma   distance of the ends of stochastic and deterministic chains, in standard errors
    without_drift_sigma      the same without Flow-SDE's correction of the drift: has to be large
    golden_max_rel           largest relative difference from other projects' outputs (`flow_references`), over
                             `golden_arrays` of them; another set: `VLA_RL_GOLDEN_FLOW=FOLDER`
    golden_nft_max_rel       the same for losses and gradients of pi-StepNFT (`flow_nft`)
    layouts_bit_equal        1 if folders of openpi and LeRobot are written as they were read
    broken_folders_refused   of ten broken folders, those whose refusal names the fault
    first_ratio_max_diff     largest log-ratio of a decision before any update, in other batches than acted
                             (`first_ratio_same_batch`: in the same; `first_ratio_limit`: the bound)
    decisions_vs_plain       time of the decisions of 16 episodes one after another, as a plain sampling loop makes
                             them, over that through the engine, for a policy that takes 20 ms + 0.5 ms a row
                             (`shipped_...`: CPU time of the shipped base, of `shipped_parameters_millions`)
    update_with_kept_prefix_vs_without   CPU time of an update of 4 epochs that keeps the frozen prefix, over
                             that of one that computes it in each epoch (`parameters_millions`)

Chains run on a mixture of two normal distributions in one dimension, whose velocity is known in
closed form, so no network's error hides the sampler's.
"""

import json
import math
import sys
from typing import Final

import torch
from torch import Tensor

from benchmarks.flow_decisions import measure_small_policy
from benchmarks.flow_references import measure_references
from benchmarks.flow_updates import measure_updates
from vla_rl.models.flow.transitions import Schedule

WEIGHTS: Final = torch.tensor([0.3, 0.7], dtype=torch.float64)
MEANS: Final = torch.tensor([-0.8, 0.5], dtype=torch.float64)
STDS: Final = torch.tensor([0.15, 0.3], dtype=torch.float64)

NUM_CHAINS: Final = 20_000
NUM_STEPS: Final = 200
NOISE_LEVEL: Final = 0.5


def mixture_velocity(x: Tensor, time: float) -> Tensor:
    """Return E[noise - a | x_t = x], float32 of the shape of x, for actions a from the mixture."""
    positions = x[..., None].double()
    variance = time**2 + (1.0 - time) ** 2 * STDS.square()
    distance = positions - (1.0 - time) * MEANS
    log_joint = WEIGHTS.log() - 0.5 * variance.log() - 0.5 * distance.square() / variance
    action = MEANS + (1.0 - time) * STDS.square() / variance * distance
    noise = time / variance * distance
    return (log_joint.softmax(-1) * (noise - action)).sum(-1).float()


def run_mixture(schedule: Schedule, seed: int, has_drift: bool = True) -> Tensor:
    """Run chains in which every step follows `schedule`; return their ends, float64 [N].

    Args:
        schedule: the rule of the steps.
        seed: seed of the start and of the steps.
        has_drift: whether the mean is corrected for the noise that is added.
    """
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(NUM_CHAINS, 1, 1, generator=generator)
    plain = Schedule("ode", schedule.num_steps)
    for number in range(schedule.num_steps):
        step = torch.full((NUM_CHAINS,), number)
        velocity = mixture_velocity(x, 1.0 - number / schedule.num_steps)
        mean, std = schedule.transition(x, velocity, step)
        if not has_drift:
            mean = plain.transition(x, velocity, step).mean
        x = mean + std[:, None, None] * torch.randn(x.shape, generator=generator)
    return x.flatten().double()


def marginal_sigma(first: Tensor, second: Tensor) -> float:
    """Return the largest difference of two samples' first and second moments, in standard errors."""
    found = []
    for power in (1, 2):
        one, other = first**power, second**power
        error = math.sqrt(float(one.var() + other.var()) / len(one))
        found.append(abs(float(one.mean() - other.mean())) / error)
    return max(found)


def measure_marginals(seed: int = 0) -> dict[str, float]:
    """Compare the ends of stochastic chains with those of deterministic ones."""
    plain = run_mixture(Schedule("ode", NUM_STEPS), 2 * seed + 1)
    noisy = Schedule("flow_sde", NUM_STEPS, NOISE_LEVEL)
    return {
        "ode_sde_marginal_sigma": marginal_sigma(run_mixture(noisy, 2 * seed), plain),
        "without_drift_sigma": marginal_sigma(run_mixture(noisy, 2 * seed, False), plain),
    }


def main() -> int:
    """Print the figures."""
    figures = measure_marginals() | measure_references() | measure_small_policy()
    print(json.dumps(figures | measure_updates()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
