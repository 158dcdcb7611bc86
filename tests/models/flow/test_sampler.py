"""The sampler of flow policies: each decision's chance is its own, and one step of a chain is stochastic."""

import pytest
import torch
from torch import Tensor

from vla_rl.models.flow.sampler import NO_STEP, Draws, run_chain
from vla_rl.models.flow.transitions import Schedule, log_density
from vla_rl.types import Sampling

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
