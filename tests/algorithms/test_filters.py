"""Which groups and tokens are worth an update; one number from the losses of its tokens, however a batch is cut."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from vla_rl.algorithms import (
    AGGREGATIONS,
    OverlongConfig,
    aggregation,
    count_denominators,
    group_advantage,
    has_equal_rewards,
    overlong_filter,
    overlong_penalty,
    require_satisfiable,
    seq_mean_token_mean,
    seq_mean_token_sum,
    seq_mean_token_sum_norm,
    token_mean,
    within_accuracy,
)
from vla_rl.errors import ConfigError


@pytest.mark.parametrize(
    ("success_rate", "kept"),
    [(0.0, False), (0.1, True), (0.125, True), (0.875, True), (0.9, True), (1.0, False)],
)
def test_accuracy_bounds_include_both_ends(success_rate, kept) -> None:
    assert within_accuracy(success_rate, 0.1, 0.9) is kept


def test_bounds_from_zero_to_one_keep_every_group() -> None:
    assert within_accuracy(0.0, 0.0, 1.0)
    assert within_accuracy(1.0, 0.0, 1.0)


@pytest.mark.parametrize(
    ("lowest", "highest"), [(0.9, 0.1), (-0.1, 0.5), (0.5, 1.1), (float("nan"), 1.0)]
)
def test_bounds_that_nothing_can_satisfy_are_refused(lowest, highest) -> None:
    with pytest.raises(ConfigError, match="accuracy bounds"):
        within_accuracy(0.5, lowest, highest)


@pytest.mark.parametrize(
    ("rewards", "equal"),
    [([], True), ([1.0], True), ([0.0, 0.0], True), ([0.3, 0.3], True), ([0.0, 0.0, 1.0], False)],
)
def test_equal_rewards_are_recognised(rewards, equal) -> None:
    assert has_equal_rewards(rewards) is equal


def test_rewards_that_differ_in_their_last_digit_are_not_equal_and_still_train() -> None:
    for rewards in ([0.5, np.nextafter(0.5, 1.0)], [1e-9, 0.0], [1.0, 1.0, 1.0 - 1e-7]):
        assert not has_equal_rewards(rewards)
        assert group_advantage(rewards).any()
    same = [0.1 + 0.2] * 3  # whose mean is not exactly each of them
    assert has_equal_rewards(same)
    assert not group_advantage(same).any()


def test_a_group_of_two_may_differ() -> None:
    assert not has_equal_rewards([0.0, 1.0])


def test_bounds_that_no_group_of_this_size_can_meet_are_refused_with_the_inequality() -> None:
    require_satisfiable(4, 0.25, 0.25)
    with pytest.raises(
        ConfigError, match=r"k / 4 with 0 <= k <= 4, and none has 0.3 <= k / 4 <= 0.45"
    ):
        require_satisfiable(4, 0.3, 0.45)
    require_satisfiable(2, 0.0, 1.0, needs_difference=True)
    with pytest.raises(
        ConfigError, match=r"k / 4 with 1 <= k <= 3, and none has 0.0 <= k / 4 <= 0.2"
    ):
        require_satisfiable(4, 0.0, 0.2, needs_difference=True)
    with pytest.raises(ConfigError, match="no group of 1 can be kept"):
        require_satisfiable(1, 0.0, 1.0, needs_difference=True)


def test_the_overlong_penalty_grows_over_the_buffer_and_no_further() -> None:
    config = OverlongConfig(max_length=100, buffer=20, factor=0.5)
    found = overlong_penalty(np.array([0, 80, 85, 90, 100, 130]), config)
    np.testing.assert_allclose(found, [0.0, 0.0, -0.125, -0.25, -0.5, -0.5])
    assert overlong_penalty(np.array([10_000]), OverlongConfig()).tolist() == [0.0]
    assert overlong_penalty(np.array([]), config).shape == (0,)


def test_a_buffer_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"buffer is 101, expected at most max_length = 100"):
        OverlongConfig(max_length=100, buffer=101)


def test_what_was_cut_off_leaves_the_loss_with_all_its_steps() -> None:
    mask = np.array([[True, True, False], [True, True, True]])
    assert overlong_filter(mask, np.array([True, False])).tolist() == [[False] * 3, [True] * 3]
    with pytest.raises(ValueError, match=r"is_truncated is \[3\], expected \[2\]"):
        overlong_filter(mask, np.zeros(3, dtype=bool))


# two trajectories: rows 0 and 1 are chunks of the first (3 tokens), row 2 is the second (1 token),
# row 3 is empty
LOSSES = torch.tensor([[1.0, 2.0], [3.0, 100.0], [10.0, 100.0], [100.0, 100.0]])
MASK = torch.tensor([[1, 1], [1, 0], [1, 0], [0, 0]]).bool()
SEQUENCE = torch.tensor([7, 7, 3, 5])


@pytest.mark.parametrize(
    ("reduce", "expected"),
    [
        (token_mean, 16.0 / 4),
        (seq_mean_token_mean, ((1.0 + 2.0 + 3.0) / 3 + 10.0) / 2),
        (seq_mean_token_sum, (6.0 + 10.0) / 2),
        (seq_mean_token_sum_norm, (6.0 / 8 + 10.0 / 8) / 2),
    ],
)
def test_a_trajectory_over_several_rows_counts_once_and_an_empty_one_not_at_all(
    reduce, expected
) -> None:
    assert reduce(
        LOSSES, MASK, count_denominators(MASK, SEQUENCE, length=8)
    ).item() == pytest.approx(expected)


def test_without_ids_each_row_is_a_sequence() -> None:
    denominators = count_denominators(MASK)
    assert (denominators.num_tokens, denominators.num_sequences) == (4, 3)
    assert seq_mean_token_mean(LOSSES, MASK, denominators).item() == pytest.approx(
        (1.5 + 3.0 + 10.0) / 3
    )


@pytest.mark.parametrize("reduce", list(AGGREGATIONS.values()))
def test_padding_that_is_not_finite_does_not_reach_the_result(reduce) -> None:
    losses = torch.where(MASK, LOSSES, float("nan")).requires_grad_()
    reduce(losses, MASK, count_denominators(MASK, length=2)).backward()
    assert losses.grad is not None
    assert torch.isfinite(losses.grad).all()
    assert not losses.grad[~MASK].any()


@pytest.mark.parametrize("reduce", list(AGGREGATIONS.values()))
def test_an_update_without_a_token_is_refused(reduce) -> None:
    mask = torch.zeros(2, 2).bool()
    with pytest.raises(ValueError, match="no unmasked token"):
        reduce(torch.ones(2, 2), mask, count_denominators(mask, length=2))


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    cuts=st.sets(st.integers(1, 7)),
    name=st.sampled_from(sorted(AGGREGATIONS)),
)
def test_any_split_and_order_of_rows_gives_the_gradient_of_the_whole_batch(
    seed, cuts, name
) -> None:
    generator = torch.Generator().manual_seed(seed)
    losses = torch.randn(8, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    mask = torch.rand(8, 5, generator=generator) < 0.5
    mask[0, 0] = True
    sequence = torch.randint(0, 4, (8,), generator=generator)
    order = torch.randperm(8, generator=generator)
    denominators = count_denominators(mask, sequence, length=12)
    reduce = aggregation(name)
    (whole,) = torch.autograd.grad(reduce(losses, mask, denominators), losses)
    edges = [0, *sorted(cuts), 8]
    parts = torch.zeros_like(losses)
    for start, stop in itertools.pairwise(edges):
        rows = order[start:stop]
        parts += torch.autograd.grad(
            reduce(losses[rows], mask[rows], denominators.rows(rows)), losses
        )[0]
    torch.testing.assert_close(parts, whole)


@pytest.mark.parametrize("name", sorted(AGGREGATIONS))
def test_ranks_that_add_their_gradients_give_the_gradient_of_one_process(name) -> None:
    generator = torch.Generator().manual_seed(2)
    losses = torch.randn(6, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    mask = torch.rand(6, 3, generator=generator) < 0.6
    sequence = torch.tensor([0, 0, 1, 2, 2, 2])
    reduce = aggregation(name)
    (alone,) = torch.autograd.grad(
        reduce(losses, mask, count_denominators(mask, sequence, length=9)), losses
    )

    # whole trajectories each; every rank counts its own and they add up the counts
    ranks = [slice(0, 3), slice(3, 6)]
    counted = [count_denominators(mask[rows], sequence[rows], length=9) for rows in ranks]
    num_tokens = sum(each.num_tokens for each in counted)
    num_sequences = sum(each.num_sequences for each in counted)
    added = torch.zeros_like(losses)
    for rows, each in zip(ranks, counted, strict=True):
        loss = reduce(losses[rows], mask[rows], each.over_ranks(num_tokens, num_sequences))
        added += torch.autograd.grad(loss, losses)[0]
    torch.testing.assert_close(added, alone)


@pytest.mark.parametrize("name", sorted(AGGREGATIONS))
def test_packing_the_tokens_of_a_trajectory_into_other_rows_changes_nothing(name) -> None:
    tokens = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])  # a trajectory of 3 tokens and one of 2
    apart = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 9.0]])
    apart_mask = torch.tensor([[True, True, True], [True, True, False]])
    packed = torch.tensor([[1.0, 2.0], [3.0, 9.0], [4.0, 9.0], [5.0, 9.0]])
    packed_mask = torch.tensor([[True, True], [True, False], [True, False], [True, False]])
    reduce = aggregation(name)
    first = reduce(
        apart, apart_mask, count_denominators(apart_mask, torch.tensor([0, 1]), length=4)
    )
    second = reduce(
        packed, packed_mask, count_denominators(packed_mask, torch.tensor([0, 0, 1, 1]), length=4)
    )
    assert first.item() == pytest.approx(second.item())
    assert tokens.sum() == apart[apart_mask].sum() == packed[packed_mask].sum()


def test_one_token_is_an_update() -> None:
    mask = torch.tensor([[True, False]])
    for name, expected in (("token_mean", 3.0), ("seq_mean_token_sum_norm", 6.0)):
        found = aggregation(name)(
            torch.tensor([[3.0, 9.0]]), mask, count_denominators(mask, length=0.5)
        )
        assert found.item() == expected


def test_the_normalised_sum_needs_its_constant() -> None:
    with pytest.raises(ValueError, match=r"needs Denominators.length, a constant of the run"):
        seq_mean_token_sum_norm(LOSSES, MASK, count_denominators(MASK))
    with pytest.raises(ValueError, match="length is 0, expected a number of tokens above 0"):
        count_denominators(MASK, length=0)


def test_an_unknown_name_is_refused_with_the_nearest_match() -> None:
    with pytest.raises(ConfigError, match="did you mean 'token_mean'"):
        aggregation("token-mean")


def test_ids_of_another_length_are_refused() -> None:
    with pytest.raises(ValueError, match=r"sequence is \[2\], expected \[4\]"):
        count_denominators(MASK, torch.tensor([0, 1]))
