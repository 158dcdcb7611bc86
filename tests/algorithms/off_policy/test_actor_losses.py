"""Losses of actors: RLT, TD3+BC, imitation, advantage weights. Numbers by hand."""

import math

import pytest
import torch

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
