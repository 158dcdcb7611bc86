"""Tanh-Gaussian actors and the temperature, against torch's distributions and finite differences."""

import math

import pytest
import torch
from small_batches import finite_differences
from torch.distributions import AffineTransform, Normal, TanhTransform, TransformedDistribution

from vla_rl.algorithms import off_policy


def inputs(seed: int = 0, scale: float = 1.0) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    mean, log_std, noise = torch.randn(3, 5, 4, generator=generator, dtype=torch.float64)
    return mean * scale, 0.3 * log_std - 0.5, noise


@pytest.mark.parametrize("bound", [1.0, 2.5])
def test_log_probs_are_those_of_torchs_transformed_distribution(bound: float) -> None:
    mean, log_std, noise = inputs()
    drawn = off_policy.sample_squashed(mean, log_std, noise, bound=bound)
    peer = TransformedDistribution(
        Normal(mean, log_std.exp()), [TanhTransform(), AffineTransform(0.0, bound)]
    )
    expected = peer.log_prob(drawn.actions).sum(dim=1)
    torch.testing.assert_close(drawn.log_probs, expected)
    stored = off_policy.squashed_log_probs(mean, log_std, drawn.actions, bound=bound)
    torch.testing.assert_close(stored, expected)
    assert drawn.actions.abs().max() < bound


def test_a_saturated_action_has_finite_log_probs_and_gradients() -> None:
    mean = torch.full((1, 2), 40.0, requires_grad=True)
    log_std = torch.zeros(1, 2, requires_grad=True)
    drawn = off_policy.sample_squashed(mean, log_std, torch.zeros(1, 2))
    assert drawn.actions.tolist() == [[1.0, 1.0]]
    # the density of a = tanh(40) is N(0) / (1 - a^2), and 1 - a^2 is 4 exp(-80)
    expected = 2 * (-0.5 * math.log(2 * math.pi) + 80.0 - math.log(4.0))
    assert drawn.log_probs.item() == pytest.approx(expected, rel=1e-6)
    drawn.log_probs.sum().backward()
    stored = off_policy.squashed_log_probs(mean, log_std, drawn.actions.detach())
    stored.sum().backward()
    assert mean.grad is not None
    assert torch.isfinite(mean.grad).all()


def test_the_gradient_passes_through_the_draw() -> None:
    mean, log_std, noise = inputs(1)

    def loss(flat: torch.Tensor) -> torch.Tensor:
        drawn = off_policy.sample_squashed(
            flat[:20].reshape(5, 4), flat[20:].reshape(5, 4), noise, bound=1.5
        )
        values = -(drawn.actions - 0.3).square().sum(dim=1)
        return off_policy.soft_actor_loss(values, drawn.log_probs, 0.2)

    flat = torch.cat([mean.flatten(), log_std.flatten()])
    leaf = flat.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(leaf), leaf)
    torch.testing.assert_close(gradient, finite_differences(loss, flat), rtol=1e-6, atol=1e-8)


def test_plain_gaussian_log_probs_add_up_over_the_numbers_of_an_action() -> None:
    mean, log_std, noise = inputs(2)
    actions = mean + noise
    expected = Normal(mean, log_std.exp()).log_prob(actions).sum(dim=1)
    torch.testing.assert_close(off_policy.gaussian_log_probs(mean, log_std, actions), expected)


def test_the_temperature_rises_while_the_entropy_is_below_its_target() -> None:
    for log_prob, sign in ((3.0, -1.0), (-3.0, 1.0)):  # entropy -3, 3 against a target of 0
        log_temperature = torch.tensor(math.log(0.5), requires_grad=True)
        loss = off_policy.temperature_loss(
            log_temperature, torch.full((4,), log_prob), target_entropy=0.0
        )
        loss.backward()
        assert log_temperature.grad is not None
        assert log_temperature.grad.item() == pytest.approx(-0.5 * log_prob)
        assert math.copysign(1.0, log_temperature.grad.item()) == sign


def test_an_actor_without_a_temperature_raises_the_value_alone() -> None:
    values, log_probs = torch.tensor([1.0, 2.0]), torch.tensor([5.0, 7.0])
    assert off_policy.soft_actor_loss(values, log_probs, 0.0).item() == -1.5
    temperature = torch.tensor(0.5, requires_grad=True)
    loss = off_policy.soft_actor_loss(values, log_probs, temperature)
    assert loss.item() == 1.5
    assert not loss.requires_grad


def test_a_log_std_of_another_width_is_refused() -> None:
    with pytest.raises(ValueError, match=r"log_std is \[2, 1\], expected \[B, A\] = \[2, 3\]"):
        off_policy.sample_squashed(torch.zeros(2, 3), torch.zeros(2, 1), torch.zeros(2, 3))
