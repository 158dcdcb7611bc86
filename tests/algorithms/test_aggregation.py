"""Aggregation: numbers by hand, and the same gradient however the batch is cut."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vla_rl.algorithms import (
    AGGREGATIONS,
    aggregation,
    count_denominators,
    seq_mean_token_mean,
    seq_mean_token_sum,
    token_mean,
)
from vla_rl.errors import ConfigError

# two trajectories: rows 0 and 1 are chunks of the first (3 tokens), row 2 is the second (1 token), row 3 is empty
LOSSES = torch.tensor([[1.0, 2.0], [3.0, 100.0], [10.0, 100.0], [100.0, 100.0]])
MASK = torch.tensor([[1, 1], [1, 0], [1, 0], [0, 0]]).bool()
SEQUENCE = torch.tensor([7, 7, 3, 5])


@pytest.mark.parametrize(
    ("reduce", "expected"),
    [
        (token_mean, 16.0 / 4),
        (seq_mean_token_mean, ((1.0 + 2.0 + 3.0) / 3 + 10.0) / 2),
        (seq_mean_token_sum, (6.0 + 10.0) / 2),
    ],
)
def test_a_trajectory_over_several_rows_counts_once_and_an_empty_one_not_at_all(reduce, expected) -> None:
    assert reduce(LOSSES, MASK, count_denominators(MASK, SEQUENCE)).item() == pytest.approx(expected)


def test_without_ids_each_row_is_a_sequence() -> None:
    denominators = count_denominators(MASK)
    assert (denominators.num_tokens, denominators.num_sequences) == (4, 3)
    assert seq_mean_token_mean(LOSSES, MASK, denominators).item() == pytest.approx((1.5 + 3.0 + 10.0) / 3)


@pytest.mark.parametrize("reduce", list(AGGREGATIONS.values()))
def test_padding_that_is_not_finite_does_not_reach_the_result(reduce) -> None:
    losses = torch.where(MASK, LOSSES, float("nan")).requires_grad_()
    reduce(losses, MASK, count_denominators(MASK)).backward()
    assert losses.grad is not None
    assert torch.isfinite(losses.grad).all()
    assert not losses.grad[~MASK].any()


@pytest.mark.parametrize("reduce", list(AGGREGATIONS.values()))
def test_an_update_without_a_token_is_refused(reduce) -> None:
    mask = torch.zeros(2, 2).bool()
    with pytest.raises(ValueError, match="no unmasked token"):
        reduce(torch.ones(2, 2), mask, count_denominators(mask))


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), cuts=st.sets(st.integers(1, 7)), name=st.sampled_from(sorted(AGGREGATIONS)))
def test_any_split_and_order_of_rows_gives_the_gradient_of_the_whole_batch(seed, cuts, name) -> None:
    generator = torch.Generator().manual_seed(seed)
    losses = torch.randn(8, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    mask = torch.rand(8, 5, generator=generator) < 0.5
    mask[0, 0] = True
    sequence = torch.randint(0, 4, (8,), generator=generator)
    order = torch.randperm(8, generator=generator)
    denominators = count_denominators(mask, sequence)
    reduce = aggregation(name)
    (whole,) = torch.autograd.grad(reduce(losses, mask, denominators), losses)
    edges = [0, *sorted(cuts), 8]
    parts = torch.zeros_like(losses)
    for start, stop in itertools.pairwise(edges):
        rows = order[start:stop]
        parts += torch.autograd.grad(reduce(losses[rows], mask[rows], denominators.rows(rows)), losses)[0]
    torch.testing.assert_close(parts, whole)


def test_an_unknown_name_is_refused_with_the_nearest_match() -> None:
    with pytest.raises(ConfigError, match="did you mean 'token_mean'"):
        aggregation("token-mean")


def test_ids_of_another_length_are_refused() -> None:
    with pytest.raises(ValueError, match=r"sequence is \[2\], expected \[4\]"):
        count_denominators(MASK, torch.tensor([0, 1]))
