"""The chain of a flow policy: its equations, RLinf's numbers (`golden/`), one stochastic step, a chance for
each decision."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.flow_policies import measure_marginals
from vla_rl.models.flow.sampler import NO_STEP, Draws, run_chain
from vla_rl.models.flow.transitions import (
    Schedule,
    Transition,
    entropy,
    kl_divergence,
    log_density,
)
from vla_rl.types import Sampling

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


SCHEDULE = Schedule("flow_sde", num_steps=4, noise_level=0.5)

SHAPE = (2, 3)


def pull(x: Tensor, time: Tensor) -> Tensor:
    """Return a velocity that depends on the state and on the time."""
    return torch.tanh(x) + time[:, None, None]


def samplings(num: int, greedy: bool = False) -> list[Sampling]:
    return [Sampling(seed=100 + number, greedy=greedy) for number in range(num)]


def test_a_decision_is_the_same_in_every_batch() -> None:
    together = run_chain(pull, Draws.from_seeds(samplings(8), SHAPE, SCHEDULE), SCHEDULE)
    for row, sampling in enumerate(samplings(8)):
        alone = run_chain(pull, Draws.from_seeds([sampling], SHAPE, SCHEDULE), SCHEDULE)
        for name in ("chunk", "state_before", "next_state"):
            assert torch.equal(getattr(alone, name)[0], getattr(together, name)[row])


def test_rows_of_one_batch_have_different_stochastic_steps_and_all_occur_equally_often() -> None:
    draws = Draws.from_seeds(samplings(4000), SHAPE, SCHEDULE)
    counts = torch.bincount(draws.step, minlength=4)
    assert counts.min() > 900  # 1000 expected, standard deviation 27
    assert draws.noise.std() == pytest.approx(1.0, abs=0.02)
    assert draws.step_noise.std() == pytest.approx(1.0, abs=0.02)
    assert abs(float((draws.noise * draws.step_noise).mean())) < 0.02


def test_only_the_drawn_step_is_stochastic() -> None:
    draws = Draws.from_seeds(samplings(6), SHAPE, SCHEDULE)
    chain = run_chain(pull, draws, SCHEDULE)
    for row in range(6):
        own = slice(row, row + 1)
        x, drawn = draws.noise[own], int(draws.step[row])
        for number in range(4):
            step = torch.tensor([number])
            v = pull(x, SCHEDULE.times(step))
            if number == drawn:
                assert torch.equal(x, chain.state_before[own])
                mean, std = SCHEDULE.transition(x, v, step)
                x = mean + std * draws.step_noise[own]
                assert torch.equal(x, chain.next_state[own])
            else:
                x = x - v / 4
        torch.testing.assert_close(x, chain.chunk[own])


def test_the_density_of_the_next_state_follows_from_the_state_before_and_the_step_alone() -> None:
    draws = Draws.from_seeds(samplings(16), SHAPE, SCHEDULE)
    chain = run_chain(pull, draws, SCHEDULE)
    velocity = pull(chain.state_before, SCHEDULE.times(draws.step))
    again = SCHEDULE.transition(chain.state_before, velocity, draws.step)
    acted = log_density(chain.next_state, chain.transition)
    assert torch.equal(log_density(chain.next_state, again), acted)


def test_with_shifted_times_the_first_ratio_is_not_one() -> None:
    draws = Draws.from_seeds(samplings(16), SHAPE, SCHEDULE)
    chain = run_chain(pull, draws, SCHEDULE)
    shifted = pull(chain.state_before, SCHEDULE.times(draws.step) - 0.25)
    other = SCHEDULE.transition(chain.state_before, shifted, draws.step)
    acted = log_density(chain.next_state, chain.transition)
    assert (log_density(chain.next_state, other) - acted).abs().max() > 0.01


def test_with_one_step_index_for_all_rows_the_first_ratio_is_not_one() -> None:
    draws = Draws.from_seeds(samplings(16), SHAPE, SCHEDULE)
    chain = run_chain(pull, draws, SCHEDULE)
    shared = draws.step[:1].expand(16)
    velocity = pull(chain.state_before, SCHEDULE.times(shared))
    other = SCHEDULE.transition(chain.state_before, velocity, shared)
    acted = log_density(chain.next_state, chain.transition)
    assert (log_density(chain.next_state, other) - acted).abs().max() > 0.01


@pytest.mark.parametrize("schedule", [SCHEDULE, Schedule("flow_sde", 4, 0.0), Schedule("ode", 4)])
def test_a_greedy_row_and_a_chain_without_noise_are_deterministic(schedule: Schedule) -> None:
    draws = Draws.from_seeds(samplings(3, greedy=True), SHAPE, schedule)
    assert draws.step.tolist() == [NO_STEP] * 3
    chain = run_chain(pull, draws, schedule)
    x = draws.noise
    for number in range(4):
        x = x - pull(x, torch.full((3,), 1.0 - number / 4)) / 4
    torch.testing.assert_close(chain.chunk, x)
    assert torch.equal(chain.next_state, chain.chunk)
    assert torch.equal(log_density(chain.next_state, chain.transition), torch.zeros(3, *SHAPE))


def test_a_row_s_noise_scale_widens_its_own_step() -> None:
    draws = Draws.from_seeds(samplings(3), SHAPE, SCHEDULE)
    usual = run_chain(pull, draws, SCHEDULE)
    wide = run_chain(pull, draws, SCHEDULE, torch.tensor([1.0, 2.0, 1.0]))
    assert torch.equal(usual.chunk[::2], wide.chunk[::2])
    assert torch.equal(2 * usual.transition.std[1], wide.transition.std[1])


def test_a_chain_without_noise_keeps_one_of_its_states() -> None:
    schedule = Schedule("flow_sde", 4, 0.0)
    draws = Draws.from_seeds(samplings(40), SHAPE, schedule)
    assert set(draws.step.tolist()) == {0, 1, 2, 3}
    chain = run_chain(pull, draws, schedule)
    plain = run_chain(
        pull, Draws(torch.full((40,), NO_STEP), draws.noise, draws.step_noise), schedule
    )
    torch.testing.assert_close(chain.chunk, plain.chunk)
    following = chain.state_before - chain.velocity / 4
    torch.testing.assert_close(chain.next_state, following)
    assert torch.equal(chain.transition.std, torch.zeros(40))
