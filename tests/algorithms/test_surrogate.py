"""The clipped surrogate: numbers by hand, gradients against finite differences, masks that hide anything."""

import math

import pytest
import torch

from vla_rl.algorithms import clipped_surrogate


def row(*values: float) -> torch.Tensor:
    return torch.tensor([values], dtype=torch.float64)


def logs(*ratios: float) -> torch.Tensor:
    return torch.tensor([[math.log(ratio) for ratio in ratios]], dtype=torch.float64)


def mask_of(*values: int) -> torch.Tensor:
    return torch.tensor([values], dtype=torch.bool)


def test_each_side_of_the_ratio_has_its_own_bound() -> None:
    ratios = logs(0.5, 1.0, 1.5, 0.5, 1.0, 1.5)
    advantage = row(1.0, 1.0, 1.0, -1.0, -1.0, -1.0)
    losses, diagnostics = clipped_surrogate(ratios, torch.zeros(1, 6), advantage, mask_of(*[1] * 6), 0.2, 0.28)
    # A > 0: -min(r, 1.28);  A < 0: max(r, 0.8)
    torch.testing.assert_close(losses, row(-0.5, -1.0, -1.28, 0.8, 1.0, 1.5))
    assert diagnostics.metrics()["clip_fraction"] == pytest.approx(2 / 6)


def test_dual_clip_bounds_only_the_loss_of_bad_tokens() -> None:
    losses, diagnostics = clipped_surrogate(
        logs(10.0, 2.0, 10.0), torch.zeros(1, 3), row(-1.0, -1.0, 1.0), mask_of(1, 1, 1), 0.2, 0.28, dual_clip=3.0
    )
    torch.testing.assert_close(losses, row(3.0, 2.0, -1.28))
    assert diagnostics.metrics()["clip_fraction"] == pytest.approx(2 / 3)


def test_diagnostics_are_means_over_unmasked_tokens_only() -> None:
    _, diagnostics = clipped_surrogate(
        logs(2.0, 0.5, 1000.0), torch.zeros(1, 3), row(0.0, 0.0, 0.0), mask_of(1, 1, 0), 0.2, 0.28
    )
    metrics = diagnostics.metrics()
    assert metrics["ratio_mean"] == pytest.approx(1.25)
    assert metrics["ratio_max"] == pytest.approx(2.0)
    assert metrics["kl_k1"] == pytest.approx(0.0, abs=1e-7)  # -(log 2 + log 0.5) / 2
    assert metrics["kl_k3"] == pytest.approx(0.25)  # ((2 - 1) + (0.5 - 1) - 0) / 2
    assert metrics["clip_fraction"] == 0.0


def test_diagnostics_of_micro_batches_add_up_to_those_of_the_batch() -> None:
    generator = torch.Generator().manual_seed(0)
    log_prob, behavior, advantage = (torch.randn(6, 5, generator=generator) for _ in range(3))
    mask = torch.rand(6, 5, generator=generator) < 0.7
    _, whole = clipped_surrogate(log_prob, behavior, advantage, mask, 0.2, 0.28)
    parts = [
        clipped_surrogate(log_prob[i], behavior[i], advantage[i], mask[i], 0.2, 0.28)[1]
        for i in (slice(0, 1), slice(1, 4), slice(4, 6))
    ]
    assert (parts[0] + parts[1] + parts[2]).metrics() == pytest.approx(whole.metrics())


@pytest.mark.parametrize("padding", [float("nan"), float("inf"), -float("inf"), 1e30])
def test_whatever_stands_in_padding_changes_neither_loss_nor_gradient(padding) -> None:
    log_prob = row(0.1, padding).requires_grad_()
    losses, diagnostics = clipped_surrogate(
        log_prob, row(0.0, padding), row(1.0, padding), mask_of(1, 0), 0.2, 0.28, 3.0
    )
    losses.sum().backward()
    assert losses[0, 1].item() == 0.0
    assert losses[0, 0].item() == pytest.approx(-math.exp(0.1))
    assert log_prob.grad is not None
    assert log_prob.grad.tolist() == [[pytest.approx(-math.exp(0.1)), 0.0]]
    assert all(math.isfinite(value) for value in diagnostics.metrics().values())


def test_a_fully_masked_or_empty_micro_batch_gives_zeros_and_no_metrics() -> None:
    log_prob = torch.full((2, 3), float("nan"), requires_grad=True)
    losses, diagnostics = clipped_surrogate(log_prob, log_prob, torch.ones(2, 1), torch.zeros(2, 3).bool(), 0.2, 0.2)
    losses.sum().backward()
    assert losses.tolist() == [[0.0] * 3] * 2
    assert log_prob.grad is not None
    assert not log_prob.grad.any()
    assert diagnostics.metrics() == {}
    empty = torch.zeros(0, 3)
    losses, diagnostics = clipped_surrogate(empty, empty, empty, empty.bool(), 0.2, 0.2)
    assert losses.shape == (0, 3)
    assert diagnostics.metrics() == {}


def test_a_huge_log_ratio_is_clamped_before_it_overflows() -> None:
    log_prob = row(500.0).requires_grad_()
    losses, diagnostics = clipped_surrogate(log_prob, row(0.0), row(-1.0), mask_of(1), 0.2, 0.28)
    losses.sum().backward()
    assert losses.item() == pytest.approx(math.exp(20.0))
    assert log_prob.grad is not None
    assert log_prob.grad.item() == 0.0
    assert math.isfinite(diagnostics.metrics()["ratio_max"])


def test_the_gradient_is_that_of_finite_differences() -> None:
    generator = torch.Generator().manual_seed(1)
    log_prob, behavior, advantage = (torch.randn(4, 6, generator=generator, dtype=torch.float64) for _ in range(3))
    mask = torch.rand(4, 6, generator=generator) < 0.8

    def loss(values: torch.Tensor) -> torch.Tensor:
        return clipped_surrogate(values, behavior, advantage, mask, 0.2, 0.28, 1.5)[0]

    assert torch.autograd.gradcheck(loss, (log_prob.requires_grad_(),))


def test_on_policy_the_gradient_is_the_policy_gradient() -> None:
    log_prob = row(-1.0, -2.0).requires_grad_()
    losses, _ = clipped_surrogate(log_prob, log_prob.detach(), torch.full((1, 1), 3.0), mask_of(1, 1), 0.2, 0.28)
    losses.sum().backward()
    assert log_prob.grad is not None
    assert log_prob.grad.tolist() == [[-3.0, -3.0]]


def test_the_behavior_policy_and_the_advantage_get_no_gradient() -> None:
    behavior, advantage = row(0.0).requires_grad_(), row(1.0).requires_grad_()
    losses, _ = clipped_surrogate(row(0.1).requires_grad_(), behavior, advantage, mask_of(1), 0.2, 0.28)
    losses.sum().backward()
    assert behavior.grad is None
    assert advantage.grad is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"log_prob": torch.zeros(2, 4)}, r"log_prob is \[2, 4\], expected \[2, 3\]"),
        ({"behavior_log_prob": torch.zeros(3)}, r"behavior_log_prob is \[3\]"),
        ({"advantage": torch.zeros(2)}, r"advantage is \[2\], expected \[2, 3\] or \[2, 1\]"),
        ({"mask": torch.ones(2, 3)}, "mask is torch.float32, expected torch.bool"),
        ({"clip_low": 1.0}, "clip_low=1.0"),
        ({"clip_high": -0.1}, "clip_high=-0.1"),
        ({"dual_clip": 1.0}, "dual_clip is 1.0, expected > 1"),
    ],
)
def test_bad_input_is_refused_by_name(change, message) -> None:
    arguments = {
        "log_prob": torch.zeros(2, 3),
        "behavior_log_prob": torch.zeros(2, 3),
        "advantage": torch.zeros(2, 3),
        "mask": torch.ones(2, 3).bool(),
        "clip_low": 0.2,
        "clip_high": 0.28,
    }
    with pytest.raises(ValueError, match=message):
        clipped_surrogate(**{**arguments, **change})
