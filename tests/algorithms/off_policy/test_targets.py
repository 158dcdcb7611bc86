"""Targets of critics: chunk returns, bootstrapping, ensembles, target networks. Numbers by hand."""

import pytest
import torch

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
