"""Transitions of flow policies: equations, RLinf's numbers (`golden/`), densities, divergences."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.flow_policies import measure_marginals
from vla_rl.models.flow.transitions import (
    Schedule,
    Transition,
    entropy,
    kl_divergence,
    log_density,
)

GOLDEN = Path(__file__).parent / "golden"
MODELS = ("pi0", "pi05")
CASES = [
    (model, method, eta, num_steps, steps)
    for model in MODELS
    for num_steps, all_steps in ((4, ("00", "33", "01")), (10, ("00", "99", "01")))
    for steps in all_steps
    for method, eta in (("flow_sde", 0.5), ("flow_sde", 0.3), ("flow_cps", 0.5), ("flow_ode", 0.5))
]


def largest_error(found: Tensor, wanted: np.ndarray) -> float:
    scale = max(float(np.abs(wanted).max()), 1e-30)
    return float(np.abs(found.numpy() - wanted).max()) / scale


@pytest.mark.parametrize(("model", "method", "eta", "num_steps", "steps"), CASES)
def test_transitions_are_those_of_rlinf(
    model: str, method: str, eta: float, num_steps: int, steps: str
) -> None:
    with np.load(GOLDEN / f"{model}_openpi_rlinf_flow_sde.npz") as stored:
        arrays = {name: stored[name] for name in stored.files}
    case = f"{method}_eta{eta}_k{num_steps}_i{steps}"
    x, reached = torch.tensor(arrays["in_noise"]), torch.tensor(arrays["in_x_next"])
    # The deterministic step holds the velocity: mean = x - v / K.
    straight = arrays[f"out_mean_flow_ode_eta0.5_k{num_steps}_i{steps}"]
    velocity = (x - torch.tensor(straight)) * num_steps
    schedule = Schedule("ode" if method == "flow_ode" else method, num_steps, eta)  # type: ignore[arg-type]

    found = schedule.transition(x, velocity, torch.tensor([int(step) for step in steps]))
    density = log_density(reached, found)[..., :7]

    assert largest_error(found.mean, arrays[f"out_mean_{case}"]) < 1e-5
    assert largest_error(found.std, arrays[f"out_std_{case}"]) < 1e-5
    assert largest_error(density, arrays[f"out_logprob_{case}"]) < 1e-5
    chunk = density.sum((1, 2))
    assert largest_error(chunk, arrays[f"out_logprob_chunk_{case}"]) < 1e-5


def test_a_deterministic_step_moves_against_the_velocity_by_one_kth() -> None:
    x, velocity = torch.tensor([[[1.0]]]), torch.tensor([[[2.0]]])
    mean, std = Schedule("ode", 4).transition(x, velocity, torch.tensor([1]))
    assert float(mean) == 0.5  # 1 - 2 / 4
    assert float(std) == 0.0


def test_a_stochastic_step_has_the_mean_and_width_of_the_equation() -> None:
    # K = 4, step 1: t = 3/4, sigma^2 = 0.25 * 3, s^2 = 3/16; a = 1 - 0.75 * 2, n = 1 + 0.25 * 2;
    # w_a = 1/2, w_n = 1/2 - (3/4 * 1/4) / (3/2) = 3/8
    x, velocity = torch.tensor([[[1.0]]]), torch.tensor([[[2.0]]])
    mean, std = Schedule("flow_sde", 4, 0.5).transition(x, velocity, torch.tensor([1]))
    assert float(mean) == pytest.approx(0.5 * -0.5 + 0.375 * 1.5)
    assert float(std) == pytest.approx(math.sqrt(3 / 16))


def test_the_density_is_the_derivative_of_the_cumulative_distribution() -> None:
    transition = Transition(torch.full((1, 1, 1), 0.3), torch.tensor([0.4]))
    normal = torch.distributions.Normal(0.3, 0.4)
    for point in (-0.5, 0.2, 0.9):
        low, high = torch.tensor(point - 1e-3), torch.tensor(point + 1e-3)
        slope = float(normal.cdf(high.double()) - normal.cdf(low.double())) / 2e-3
        density = log_density(torch.full((1, 1, 1), point), transition)
        assert math.exp(float(density)) == pytest.approx(slope, rel=1e-4)


@pytest.mark.parametrize("method", ["flow_sde", "flow_cps"])
def test_the_gradient_by_the_velocity_is_that_of_finite_differences(method: str) -> None:
    schedule = Schedule(method, 4, 0.5)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(0)
    x, reached, velocity = torch.randn(3, 4, 2, 3, generator=generator).double()
    step = torch.tensor([0, 1, 2, 1])

    def total(velocity: Tensor) -> Tensor:
        return log_density(reached, schedule.transition(x, velocity, step)).sum()

    assert torch.autograd.gradcheck(total, velocity.requires_grad_())


def test_a_deterministic_step_has_no_density_and_no_gradient() -> None:
    velocity = torch.zeros(1, 1, 1, requires_grad=True)
    transition = Schedule("ode", 4).transition(torch.ones(1, 1, 1), velocity, torch.tensor([2]))
    density = log_density(torch.ones(1, 1, 1), transition)
    density.sum().backward()  # type: ignore[no-untyped-call]
    assert density.item() == 0.0
    assert velocity.grad is not None
    assert float(velocity.grad) == 0.0
    assert float(entropy(transition)) == 0.0


def test_divergence_and_entropy_are_those_of_normal_distributions() -> None:
    mean, other, std = (
        torch.tensor([[[0.2, -1.0]]]),
        torch.tensor([[[0.5, 1.0]]]),
        torch.tensor([0.3]),
    )
    normal, reference = (
        torch.distributions.Normal(mean, 0.3),
        torch.distributions.Normal(other, 0.3),
    )
    wanted = torch.distributions.kl_divergence(normal, reference)
    torch.testing.assert_close(kl_divergence(mean, other, std), wanted)
    found = entropy(Transition(mean, std))
    torch.testing.assert_close(found, normal.entropy()[0, 0, :1])


def test_each_row_takes_its_own_step() -> None:
    schedule, generator = Schedule("flow_sde", 5, 0.4), torch.Generator().manual_seed(1)
    x, velocity = torch.randn(2, 5, 2, 3, generator=generator)
    together = schedule.transition(x, velocity, torch.arange(5))
    for row in range(5):
        own = slice(row, row + 1)
        alone = schedule.transition(x[own], velocity[own], torch.tensor([row]))
        assert torch.equal(alone.mean, together.mean[own])
        assert torch.equal(alone.std, together.std[own])


def test_the_last_step_of_flow_cps_adds_no_noise() -> None:
    assert Schedule("flow_sde", 4, 0.5).num_stochastic == 4
    assert Schedule("flow_cps", 4, 0.5).num_stochastic == 3
    assert Schedule("flow_sde", 4, 0.0).num_stochastic == 0
    assert Schedule("ode", 4, 0.5).num_stochastic == 0


def test_stochastic_chains_end_as_deterministic_ones_and_do_not_without_the_correction() -> None:
    figures = measure_marginals()
    assert figures["ode_sde_marginal_sigma"] <= 3.0
    assert figures["without_drift_sigma"] > 10.0
