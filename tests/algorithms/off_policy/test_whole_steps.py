"""RLPD and DSRL, whose losses are made of several functions: a case by hand, and finite differences."""

import torch
from small_batches import finite_differences

from vla_rl.algorithms import off_policy

NUM_CRITICS, ROWS, WIDTH = 10, 4, 3


def linear_critics(weights: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
    """Values [E, B] of critics that multiply an action by their weights [E, A]."""
    return weights @ actions.T


def test_rlpd_bootstraps_from_the_least_of_two_drawn_critics_and_trains_all_ten() -> None:
    members = off_policy.draw_members(NUM_CRITICS, 2, seed=3)
    next_values = torch.arange(10.0)[:, None].expand(NUM_CRITICS, ROWS).contiguous()
    next_values[members[0]] = -1.0  # the least of all ten would be 0 otherwise
    reduced = off_policy.reduce_critics(next_values, "min", members)
    assert reduced.tolist() == [-1.0] * ROWS
    others = torch.tensor([index for index in range(10) if index not in members.tolist()])
    next_values[others] = -5.0
    assert off_policy.reduce_critics(next_values, "min", members).tolist() == [-1.0] * ROWS
    targets = off_policy.td_targets(
        torch.ones(ROWS), torch.full((ROWS,), 0.5), torch.zeros(ROWS).bool(), reduced
    )
    values = torch.zeros(NUM_CRITICS, ROWS, requires_grad=True)
    off_policy.td_loss(values, targets).backward()
    assert values.grad is not None
    # 2 (0 - 0.5) / (10 critics * 4 rows), for each of the ten
    torch.testing.assert_close(values.grad, torch.full((10, 4), -0.025))


def test_rlpds_critic_has_the_gradient_of_its_loss() -> None:
    draw = torch.Generator().manual_seed(0)
    actions = torch.randn(ROWS, WIDTH, generator=draw, dtype=torch.float64)
    targets = torch.randn(ROWS, generator=draw, dtype=torch.float64)
    flat = torch.randn(NUM_CRITICS * WIDTH, generator=draw, dtype=torch.float64)

    def loss(weights: torch.Tensor) -> torch.Tensor:
        values = linear_critics(weights.reshape(NUM_CRITICS, WIDTH), actions)
        return off_policy.td_loss(values, targets)

    leaf = flat.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(leaf), leaf)
    torch.testing.assert_close(gradient, finite_differences(loss, flat), rtol=1e-6, atol=1e-8)


def test_dsrl_is_sac_on_bounded_noise_with_the_gradient_of_its_loss() -> None:
    draw = torch.Generator().manual_seed(1)
    weights = torch.randn(NUM_CRITICS, WIDTH, generator=draw, dtype=torch.float64)
    noise = torch.randn(ROWS, WIDTH, generator=draw, dtype=torch.float64)
    flat = torch.randn(2 * ROWS * WIDTH, generator=draw, dtype=torch.float64)
    largest = []

    def loss(actor: torch.Tensor) -> torch.Tensor:
        mean, log_std = actor.reshape(2, ROWS, WIDTH)
        steering = off_policy.sample_squashed(mean, 0.3 * log_std, noise, bound=2.5)
        largest.append(float(steering.actions.detach().abs().max()))
        values = off_policy.reduce_critics(linear_critics(weights, steering.actions), "mean")
        return off_policy.soft_actor_loss(values, steering.log_probs, 0.1)

    leaf = flat.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(leaf), leaf)
    torch.testing.assert_close(gradient, finite_differences(loss, flat), rtol=1e-5, atol=1e-8)
    assert 1.0 < max(largest) <= 2.5
