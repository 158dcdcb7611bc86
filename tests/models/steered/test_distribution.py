"""Densities of a head's actions are those of torch's distributions."""

import pytest
import torch
from torch.distributions import AffineTransform, Normal, TanhTransform, TransformedDistribution

from vla_rl.models.steered.distribution import SteeringDistribution

MEAN = torch.tensor([[0.3, -0.8], [1.2, 0.0]])
LOG_STD = torch.tensor([[-1.0, 0.2], [-0.5, -2.0]])
NOISE = torch.tensor([[0.5, -1.5], [2.0, 0.1]])


def test_without_a_limit_it_is_a_gaussian() -> None:
    found = SteeringDistribution(MEAN, LOG_STD)
    action = found.sample(NOISE)
    expected = Normal(MEAN, LOG_STD.exp())
    torch.testing.assert_close(action, MEAN + LOG_STD.exp() * NOISE)
    torch.testing.assert_close(found.log_prob(action), expected.log_prob(action))
    torch.testing.assert_close(found.entropy, expected.entropy())
    assert torch.equal(found.mode, MEAN)


def test_with_a_limit_it_is_a_squashed_gaussian() -> None:
    found = SteeringDistribution(MEAN, LOG_STD, limit=2.5)
    squashed = [TanhTransform(), AffineTransform(0.0, 2.5)]
    expected = TransformedDistribution(Normal(MEAN, LOG_STD.exp()), squashed)  # type: ignore[no-untyped-call]
    action, log_prob = found.sample_with_log_prob(NOISE)
    assert action.abs().max() < 2.5
    wanted = expected.log_prob(action)
    torch.testing.assert_close(log_prob, wanted, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found.log_prob(action), wanted, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found.mode, 2.5 * MEAN.tanh())


def test_an_action_at_its_limit_has_a_finite_density() -> None:
    found = SteeringDistribution(MEAN, LOG_STD, limit=1.0)
    assert found.log_prob(torch.ones(2, 2)).isfinite().all()
    _, log_prob = found.sample_with_log_prob(torch.full((2, 2), 40.0))
    assert log_prob.isfinite().all()


def test_a_temperature_multiplies_the_deviation_of_its_row() -> None:
    found = SteeringDistribution(MEAN, LOG_STD).tempered(torch.tensor([1.0, 2.0]))
    torch.testing.assert_close(found.log_std.exp()[0], LOG_STD.exp()[0])
    torch.testing.assert_close(found.log_std.exp()[1], 2.0 * LOG_STD.exp()[1])


@pytest.mark.parametrize("limit", [None, 1.0])
def test_shared_noise_has_the_density_of_one_control_step(limit: float | None) -> None:
    mean, log_std = MEAN.repeat(1, 3), LOG_STD.repeat(1, 3)
    shared = SteeringDistribution(mean, log_std, limit, num_shared=2)
    noise = torch.randn(2, 6, generator=torch.Generator().manual_seed(0))
    action, log_prob = shared.sample_with_log_prob(noise)
    assert torch.equal(action, action[:, :2].repeat(1, 3))
    alone = SteeringDistribution(MEAN, LOG_STD, limit)
    torch.testing.assert_close(log_prob[:, :2], alone.sample_with_log_prob(noise[:, :2])[1])
    assert (log_prob[:, 2:] == 0.0).all()
    assert (shared.entropy[:, 2:] == 0.0).all()


def test_the_gradient_of_a_sampled_density_is_that_of_finite_differences() -> None:
    mean = MEAN.double().requires_grad_()
    log_std = LOG_STD.double().requires_grad_()

    def density(mean: torch.Tensor, log_std: torch.Tensor) -> torch.Tensor:
        drawn = SteeringDistribution(mean, log_std, limit=1.5)
        action, log_prob = drawn.sample_with_log_prob(NOISE.double())
        return log_prob + action

    assert torch.autograd.gradcheck(density, (mean, log_std))
