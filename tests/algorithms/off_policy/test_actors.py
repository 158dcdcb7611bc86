"""Actors of off-policy learners: their losses, Tanh-Gaussian policies, whole steps of RLPD, DSRL. Numbers by
hand, gradients by finite differences."""

import math

import pytest
import torch
from small_batches import finite_differences
from torch.distributions import AffineTransform, Normal, TanhTransform, TransformedDistribution

from vla_rl.algorithms import off_policy
from vla_rl.algorithms.off_policy import LossWeights


def test_cloning_aims_at_the_reference_and_where_an_expert_acted_at_what_they_did() -> None:
    reference, executed = torch.zeros(2, 4), torch.ones(2, 4)
    by_step = torch.tensor([[False, True], [False, False]])
    by_number = torch.tensor([[False, False, True, True], [False] * 4])
    expected = torch.tensor([[0.0, 0.0, 1.0, 1.0], [0.0] * 4])
    for flags in (by_step, by_number):
        assert torch.equal(off_policy.cloning_targets(reference, executed, flags), expected)
    with pytest.raises(ValueError, match="intervened has 3 flags a row, expected a divisor of the"):
        off_policy.cloning_targets(reference, executed, torch.zeros(2, 3).bool())


def test_a_dropped_reference_is_zeros() -> None:
    found = off_policy.drop_references(torch.ones(2, 3), torch.tensor([True, False]))
    assert found.tolist() == [[0.0] * 3, [1.0] * 3]


def test_cloning_is_a_mean_over_the_numbers_of_a_chunk() -> None:
    actions, targets = torch.tensor([[1.0, 3.0]]), torch.tensor([[0.0, 0.0]])
    assert off_policy.imitation_errors(actions, targets).tolist() == [5.0]
    assert off_policy.imitation_errors(actions, targets, distance="l1").tolist() == [2.0]
    with pytest.raises(ValueError, match='distance is \'l2\', expected "l1" or "mse"'):
        off_policy.imitation_errors(actions, targets, distance="l2")  # type: ignore[arg-type]


def test_the_actors_loss_weighs_value_against_cloning() -> None:
    values = torch.tensor([1.0, 3.0], requires_grad=True)
    errors = torch.tensor([0.5, 1.5], requires_grad=True)
    loss = off_policy.value_and_cloning_loss(values, errors, LossWeights(bc=2.0, q=0.5))
    assert loss.item() == -0.5 * 2.0 + 2.0 * 1.0
    loss.backward()
    assert values.grad is not None
    assert errors.grad is not None
    assert values.grad.tolist() == [-0.25, -0.25]
    assert errors.grad.tolist() == [1.0, 1.0]


def test_td3_bc_divides_the_value_by_its_size() -> None:
    weights = off_policy.cloning_weights(torch.tensor([-4.0, 6.0]), alpha=2.5)
    assert weights == LossWeights(bc=1.0, q=0.5)


def test_weights_are_ramped_after_the_warm_up() -> None:
    first, last = LossWeights(7.0, 0.1), LossWeights(3.0, 0.5)

    def ramp(update: int, length: int) -> LossWeights:
        return off_policy.ramp_weights(
            update, first=first, last=last, warmup_updates=10, ramp_updates=length
        )

    assert ramp(9, 4) == first
    assert ramp(10, 4) == pytest.approx((6.0, 0.2))
    assert ramp(13, 4) == ramp(1000, 4) == pytest.approx(last)
    assert ramp(9, 0) == first
    assert ramp(10, 0) == pytest.approx(last)


def test_imitation_counts_labelled_rows_alone_whatever_the_others_hold() -> None:
    errors = torch.tensor([1.0, float("nan"), 3.0], requires_grad=True)
    loss = off_policy.imitation_loss(errors, torch.tensor([True, False, True]))
    assert loss.item() == 2.0
    loss.backward()
    assert errors.grad is not None
    assert errors.grad.tolist() == [0.5, 0.0, 0.5]
    weighted = off_policy.imitation_loss(torch.tensor([1.0, 4.0]), torch.tensor([1.0, 3.0]))
    assert weighted.item() == (1.0 + 12.0) / 4.0


def test_imitation_of_no_row_is_refused() -> None:
    with pytest.raises(ValueError, match="no row of the batch counts for imitation"):
        off_policy.imitation_loss(torch.ones(2), torch.tensor([False, False]))


def test_better_actions_weigh_more_up_to_a_bound() -> None:
    weights = off_policy.advantage_weights(
        torch.tensor([0.0, 0.5, -0.5, 100.0]), temperature=0.5, max_weight=20.0
    )
    torch.testing.assert_close(weights, torch.tensor([1.0, math.e, 1.0 / math.e, 20.0]))
    costs = torch.tensor([1.0, 1.0, 1.0, 2.0])
    loss = off_policy.weighted_cloning_loss(costs, torch.tensor([1.0, 2.0, 3.0, 4.0]))
    assert loss.item() == (1.0 + 2.0 + 3.0 + 8.0) / 4


def test_a_temperature_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match=r"temperature is 0.0, max_weight 20.0; expected numbers"):
        off_policy.advantage_weights(torch.zeros(1), temperature=0.0, max_weight=20.0)


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
