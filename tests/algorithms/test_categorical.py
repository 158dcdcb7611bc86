"""Check the entropy against its definition, in value and in gradient."""

import math

import pytest
import torch

from vla_rl.algorithms import entropy


def test_entropy_of_known_distributions() -> None:
    uniform = torch.zeros(256)
    coin = torch.log(torch.tensor([0.25, 0.75]))
    assert entropy(uniform).item() == pytest.approx(math.log(256.0))
    assert entropy(coin).item() == pytest.approx(-0.25 * math.log(0.25) - 0.75 * math.log(0.75))


def test_impossible_actions_add_nothing_to_entropy_or_gradient() -> None:
    logits = torch.tensor([[0.0, 0.0, -torch.inf]], requires_grad=True)
    result = entropy(logits)
    result.sum().backward()
    assert result.item() == pytest.approx(math.log(2.0))
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()


def test_the_gradient_of_entropy_is_that_of_finite_differences() -> None:
    logits = torch.tensor([[0.5, -1.0, 2.0]], requires_grad=True)
    entropy(logits).sum().backward()
    assert logits.grad is not None
    for index in range(3):
        bump = torch.zeros(1, 3)
        bump[0, index] = 1e-2
        difference = (
            entropy(logits.detach() + bump) - entropy(logits.detach() - bump)
        ).item() / 2e-2
        assert logits.grad[0, index].item() == pytest.approx(difference, abs=1e-4)
