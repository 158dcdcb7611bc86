"""Critics of off-policy learners: targets, losses, values over bins, RECAP's returns, advantages, labels. Numbers by
hand, gradients by finite differences."""

import math

import numpy as np
import pytest
import torch
from small_batches import finite_differences

from vla_rl.algorithms import off_policy

NAN = float("nan")


def test_a_chunk_that_was_cut_short_counts_the_steps_that_ran_alone() -> None:
    rewards = torch.tensor([[1.0, 2.0, 4.0], [1.0, NAN, NAN]])
    num_rewards = torch.tensor([3, 1])
    returns = off_policy.chunk_returns(rewards, num_rewards, gamma=0.5)
    torch.testing.assert_close(returns, torch.tensor([1.0 + 1.0 + 1.0, 1.0]))
    discounts = off_policy.bootstrap_discounts(num_rewards, gamma=0.5)
    torch.testing.assert_close(discounts, torch.tensor([0.125, 0.5]))


def test_a_time_limit_bootstraps_and_a_termination_does_not() -> None:
    targets = off_policy.td_targets(
        torch.tensor([1.0, 1.0]),
        torch.tensor([0.5, 0.5]),
        torch.tensor([False, True]),
        torch.tensor([4.0, NAN]),
    )
    torch.testing.assert_close(targets, torch.tensor([3.0, 1.0]))


def test_targets_outside_of_what_is_possible_are_clamped_and_have_no_gradient() -> None:
    next_values = torch.tensor([1.6, -0.4, 0.5], requires_grad=True)
    targets = off_policy.td_targets(
        torch.zeros(3),
        torch.ones(3),
        torch.zeros(3, dtype=torch.bool),
        next_values,
        value_range=(0.0, 1.0),
    )
    torch.testing.assert_close(targets, torch.tensor([1.0, 0.0, 0.5]))
    assert not targets.requires_grad


@pytest.mark.parametrize(
    ("reduction", "members", "expected"),
    [
        ("min", None, [-1.0, 0.0]),
        ("mean", None, [2.0, 3.0]),
        ("first", None, [3.0, 0.0]),
        ("min", [0, 2], [3.0, 0.0]),
        ("mean", [0, 1], [1.0, 2.5]),
    ],
)
def test_an_ensemble_is_reduced_over_all_critics_or_a_subset(
    reduction: off_policy.Reduction, members: list[int] | None, expected: list[float]
) -> None:
    values = torch.tensor([[3.0, 0.0], [-1.0, 5.0], [4.0, 4.0]])
    chosen = None if members is None else torch.tensor(members)
    found = off_policy.reduce_critics(values, reduction, chosen)
    torch.testing.assert_close(found, torch.tensor(expected))


def test_a_subset_has_different_critics_and_follows_from_its_seed() -> None:
    drawn = [off_policy.draw_members(10, 2, seed=seed) for seed in range(200)]
    assert all(len(set(members.tolist())) == 2 for members in drawn)
    counts = torch.bincount(torch.cat(drawn), minlength=10)
    assert counts.min() >= 20  # 40 expected of each of the ten
    assert torch.equal(off_policy.draw_members(10, 2, seed=7), drawn[7])


def test_target_noise_is_bounded_and_stays_inside_of_the_actions() -> None:
    found = off_policy.noisy_target_actions(
        torch.tensor([[0.0, 0.0, 0.9]]),
        torch.tensor([[1.0, 10.0, 10.0]]),
        scale=0.2,
        noise_bound=0.5,
    )
    torch.testing.assert_close(found, torch.tensor([[0.2, 0.5, 1.0]]))


def test_entropy_adds_to_the_value_of_unlikely_actions() -> None:
    found = off_policy.soft_values(torch.tensor([1.0, 1.0]), torch.tensor([-2.0, 3.0]), 0.5)
    torch.testing.assert_close(found, torch.tensor([2.0, -0.5]))


def test_target_parameters_move_towards_the_learnt_ones_in_place() -> None:
    target, online = [torch.zeros(2), torch.ones(1)], [torch.ones(2), torch.ones(1) * 3.0]
    off_policy.move_target_parameters(target, online, rate=0.25)
    torch.testing.assert_close(target[0], torch.full((2,), 0.25))
    torch.testing.assert_close(target[1], torch.tensor([1.5]))
    off_policy.move_target_parameters(target, online, rate=1.0)
    assert torch.equal(target[0], online[0])
    assert torch.equal(target[1], online[1])


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        (
            lambda: off_policy.chunk_returns(torch.zeros(1, 3), torch.tensor([4]), gamma=0.9),
            "num_rewards has 4 to 4, expected 1 to 3, the width of rewards",
        ),
        (
            lambda: off_policy.bootstrap_discounts(torch.tensor([0, 2]), gamma=0.9),
            "num_rewards has 0 to 2, expected at least 1",
        ),
        (
            lambda: off_policy.bootstrap_discounts(torch.tensor([1]), gamma=1.5),
            "gamma is 1.5, expected a number above 0 and at most 1",
        ),
        (
            lambda: off_policy.td_targets(
                torch.zeros(2), torch.ones(2), torch.zeros(2).bool(), torch.zeros(2, 1)
            ),
            r"next_values is \[2, 1\], expected \[B\] = \[2\]",
        ),
        (
            lambda: off_policy.td_targets(
                torch.zeros(1),
                torch.ones(1),
                torch.zeros(1).bool(),
                torch.zeros(1),
                value_range=(1.0, 0.0),
            ),
            r"value_range is \(1.0, 0.0\), expected two numbers, the lower first",
        ),
        (lambda: off_policy.draw_members(2, 3, seed=0), "3 critics of 2 cannot be drawn"),
        (
            lambda: off_policy.move_target_parameters([torch.zeros(1)], [], rate=0.5),
            "the target network has 1 parameters, the learnt one 0",
        ),
        (lambda: off_policy.move_target_parameters([], [], rate=0.0), "rate is 0.0, expected"),
    ],
)
def test_what_does_not_fit_is_refused(call, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        call()


def test_the_td_loss_is_a_mean_over_critics_and_rows() -> None:
    values = torch.tensor([[1.0, 2.0], [3.0, 2.0]], requires_grad=True)
    loss = off_policy.td_loss(values, torch.tensor([1.0, 0.0]))
    assert loss.item() == (0.0 + 4.0 + 4.0 + 4.0) / 4
    loss.backward()
    assert values.grad is not None
    torch.testing.assert_close(values.grad, torch.tensor([[0.0, 1.0], [1.0, 1.0]]))


def test_targets_with_an_axis_too_many_are_refused_instead_of_broadcast() -> None:
    with pytest.raises(ValueError, match=r"targets is \[2, 1\], expected \[B\] = \[2\]"):
        off_policy.td_loss(torch.zeros(2, 2), torch.zeros(2, 1))


def test_a_batch_without_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="the batch has no row"):
        off_policy.td_loss(torch.zeros(2, 0), torch.zeros(0))


def test_the_conservative_gap_is_zero_where_all_actions_are_worth_the_same() -> None:
    # uniform samples of density 1/4 on S = 2: log(2 * exp(1 + log 4)) - 1 = log 8
    gaps = off_policy.conservative_gaps(
        torch.ones(1, 3, 2), torch.full((3, 2), -math.log(4.0)), torch.ones(1, 3)
    )
    assert gaps.tolist() == pytest.approx([math.log(8.0)])


def test_the_conservative_gap_pushes_high_samples_down_and_the_data_up() -> None:
    torch.manual_seed(0)
    sampled, densities, data = torch.randn(2, 3, 4), torch.randn(3, 4), torch.randn(2, 3)
    values = torch.cat([sampled.flatten(), data.flatten()]).double()

    def penalty(flat: torch.Tensor) -> torch.Tensor:
        return off_policy.conservative_gaps(
            flat[:24].reshape(2, 3, 4), densities.double(), flat[24:].reshape(2, 3)
        ).mean()

    leaf = values.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(penalty(leaf), leaf)
    torch.testing.assert_close(gradient, finite_differences(penalty, values))
    assert (gradient[:24] > 0).all()
    torch.testing.assert_close(gradient[24:], torch.full((6,), -1 / 6).double())


def test_the_conservative_weight_grows_while_the_gap_is_above_its_threshold() -> None:
    for gaps, sign in ((torch.tensor([6.0, 8.0]), -1.0), (torch.tensor([1.0, 2.0]), 1.0)):
        log_multiplier = torch.tensor(math.log(2.0), requires_grad=True)
        off_policy.conservative_multiplier_loss(log_multiplier, gaps, threshold=5.0).backward()
        assert log_multiplier.grad is not None
        assert log_multiplier.grad.item() == pytest.approx(-2.0 * (gaps.mean().item() - 5.0))
        assert math.copysign(1.0, log_multiplier.grad.item()) == sign


def test_an_expectile_weighs_values_that_are_too_low_more() -> None:
    values = torch.tensor([0.0, 2.0], requires_grad=True)
    loss = off_policy.expectile_loss(values, torch.tensor([1.0, 1.0]), expectile=0.9)
    assert loss.item() == pytest.approx((0.9 * 1.0 + 0.1 * 1.0) / 2)
    loss.backward()
    assert values.grad is not None
    torch.testing.assert_close(values.grad, torch.tensor([-0.9, 0.1]))


def test_an_expectile_of_a_half_is_the_mean_and_a_high_one_the_best() -> None:
    actions = torch.tensor([0.0, 0.0, 0.0, 1.0])
    grid = torch.linspace(0.0, 1.0, 1001)

    def fitted(expectile: float) -> float:
        losses = [
            off_policy.expectile_loss(value.expand(4), actions, expectile=expectile)
            for value in grid
        ]
        return float(grid[torch.stack(losses).argmin()])

    assert fitted(0.5) == pytest.approx(0.25, abs=2e-3)
    assert fitted(0.99) == pytest.approx(0.99 / (0.99 + 0.03), abs=2e-3)


@pytest.mark.parametrize("expectile", [0.0, 1.0, -0.5])
def test_an_expectile_out_of_range_is_refused(expectile: float) -> None:
    with pytest.raises(ValueError, match="expected a number between 0 and 1"):
        off_policy.expectile_loss(torch.zeros(1), torch.zeros(1), expectile=expectile)


def test_a_return_is_divided_between_its_two_nearest_bins() -> None:
    returns = torch.tensor([-1.0, -0.8, -0.5, 0.0, -7.0, 3.0])
    spread = off_policy.spread_over_bins(returns, 3, low=-1.0, high=0.0)
    expected = [[1, 0, 0], [0.6, 0.4, 0], [0, 1, 0], [0, 0, 1], [1, 0, 0], [0, 0, 1]]
    torch.testing.assert_close(spread, torch.tensor(expected, dtype=torch.float32))


def test_the_mean_over_bins_gives_the_return_back() -> None:
    returns = torch.linspace(-1.0, 0.0, 37, dtype=torch.float64)
    spread = off_policy.spread_over_bins(returns, 11, low=-1.0, high=0.0)
    found = off_policy.expected_values(spread.clamp(min=1e-30).log(), low=-1.0, high=0.0)
    torch.testing.assert_close(found, returns)


def test_the_loss_is_a_cross_entropy_with_its_gradient() -> None:
    targets = off_policy.spread_over_bins(torch.tensor([-0.8, 0.0]), 3, low=-1.0, high=0.0)
    assert off_policy.bin_loss(torch.zeros(2, 3), targets).item() == pytest.approx(math.log(3.0))
    flat = torch.randn(6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def loss(logits: torch.Tensor) -> torch.Tensor:
        return off_policy.bin_loss(logits.reshape(2, 3), targets.double())

    leaf = flat.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(leaf), leaf)
    torch.testing.assert_close(gradient, finite_differences(loss, flat), rtol=1e-6, atol=1e-8)
    expected = (torch.softmax(flat.reshape(2, 3), dim=1) - targets) / 2
    torch.testing.assert_close(gradient.reshape(2, 3), expected)


def test_guidance_goes_beyond_the_conditioned_prediction() -> None:
    conditioned, plain = torch.tensor([1.0, 2.0]), torch.tensor([0.0, 2.0])
    for weight, expected in ((0.0, [0.0, 2.0]), (1.0, [1.0, 2.0]), (2.5, [2.5, 2.0])):
        assert off_policy.guide(conditioned, plain, weight).tolist() == expected


def test_one_bin_is_refused() -> None:
    with pytest.raises(ValueError, match=r"1 bins from -1\.0 to 0\.0; expected at least 2"):
        off_policy.spread_over_bins(torch.zeros(1), 1, low=-1.0, high=0.0)


def test_a_success_costs_its_steps_and_a_failure_more_than_the_longest_success() -> None:
    success = off_policy.normalised_returns(3, is_success=True, longest=5)
    failure = off_policy.normalised_returns(5, is_success=False, longest=5)
    np.testing.assert_allclose(success, [-0.2, -0.1, 0.0])
    np.testing.assert_allclose(failure, [-0.9, -0.8, -0.7, -0.6, -0.5], rtol=1e-6)
    cheap = off_policy.normalised_returns(2, is_success=False, longest=5, failure_cost=0.0)
    np.testing.assert_allclose(cheap, [-0.2, 0.0])
    assert failure.dtype == np.float32


def test_an_advantage_looks_n_steps_ahead_and_at_the_end_at_the_return() -> None:
    returns = np.array([-0.4, -0.3, -0.2, -0.1], np.float32)
    values = np.array([-0.5, -0.2, -0.6, -0.1], np.float32)
    found = off_policy.n_step_advantages(returns, values, num_steps=2)
    # -0.4 + 0.2 - 0.6 + 0.5; -0.3 + 0.1 - 0.1 + 0.2; -0.2 + 0.6; -0.1 + 0.1
    np.testing.assert_allclose(found, [-0.3, -0.1, 0.4, 0.0], atol=1e-6)
    longer = off_policy.n_step_advantages(returns, values, num_steps=50)
    np.testing.assert_allclose(longer, returns - values, atol=1e-7)


def test_values_that_are_right_leave_no_advantage() -> None:
    returns = off_policy.normalised_returns(40, is_success=False, longest=60)
    for num_steps in (1, 7, 50):
        found = off_policy.n_step_advantages(returns, returns, num_steps=num_steps)
        np.testing.assert_allclose(found, 0.0, atol=1e-7)


def test_smoothing_averages_what_follows_with_weights_that_decay() -> None:
    advantages = np.array([1.0, 0.0, 4.0], np.float32)
    found = off_policy.smooth_advantages(advantages, decay=0.5, window=2)
    np.testing.assert_allclose(found, [1.0 / 1.5, 2.0 / 1.5, 4.0], rtol=1e-6)
    whole = off_policy.smooth_advantages(advantages, decay=0.5, window=50)
    np.testing.assert_allclose(whole[0], (1.0 + 0.0 + 1.0) / 1.75, rtol=1e-6)
    np.testing.assert_allclose(
        off_policy.smooth_advantages(advantages, decay=0.5, window=1), advantages
    )


def test_the_top_share_of_each_task_is_positive_and_so_are_demonstrations() -> None:
    scores = np.array([0.1, 0.9, 0.5, 0.2, -3.0, -1.0, -2.0, -9.0])
    tasks = np.array([0, 0, 0, 0, 1, 1, 1, 1])
    always = np.array([False] * 7 + [True])
    found = off_policy.label_advantages(scores, tasks, always, positive_share=0.3)
    # 0.3 of four steps is rounded up to two; the second task's best are bad and still its best
    assert found.tolist() == [False, True, True, False, False, True, True, True]
    none = off_policy.label_advantages(scores, tasks, always, positive_share=0.0)
    assert none.tolist() == always.tolist()


def test_of_equal_scores_the_first_are_chosen() -> None:
    found = off_policy.label_advantages(
        np.zeros(4), np.zeros(4, np.int64), np.zeros(4, np.bool_), positive_share=0.5
    )
    assert found.tolist() == [True, True, False, False]


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        (
            lambda: off_policy.normalised_returns(6, is_success=True, longest=5),
            "num_steps is 6, expected 1 to longest, 5",
        ),
        (
            lambda: off_policy.normalised_returns(1, is_success=True, longest=5, failure_cost=-1.0),
            r"failure_cost is -1\.0, expected",
        ),
        (
            lambda: off_policy.n_step_advantages(np.zeros(3), np.zeros((3, 1)), num_steps=1),
            r"returns are \[3\], values \[3, 1\]; expected \[T\] of both",
        ),
        (
            lambda: off_policy.n_step_advantages(np.zeros(3), np.zeros(3), num_steps=0),
            "num_steps is 0, expected at least 1",
        ),
        (
            lambda: off_policy.smooth_advantages(np.zeros(3), decay=1.5, window=2),
            r"decay is 1\.5, window 2; expected",
        ),
        (
            lambda: off_policy.label_advantages(
                np.array([np.nan]), np.zeros(1), np.zeros(1), positive_share=0.3
            ),
            "a score is NaN or infinite",
        ),
        (
            lambda: off_policy.label_advantages(
                np.zeros(1), np.zeros(1), np.zeros(1), positive_share=1.3
            ),
            r"positive_share is 1\.3, expected a share from 0 to 1",
        ),
        (
            lambda: off_policy.label_advantages(
                np.zeros(2), np.zeros(1), np.zeros(2), positive_share=0.3
            ),
            r"scores, tasks and always are \[\[2\], \[1\], \[2\]\], expected \[N\] of each",
        ),
    ],
)
def test_labels_of_what_does_not_fit_are_refused(call, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        call()
