"""pi-StepNFT by hand: two predictions, their errors, and what an advantage makes of them."""

import dataclasses
import math
from typing import Any

import pytest
import torch
from small_batches import finite_differences, loss_of, row
from torch import Tensor

from vla_rl.algorithms.kl import exact_kl
from vla_rl.algorithms.losses import KlLossConfig, PolicyLossConfig, TokenBatch, policy_loss
from vla_rl.errors import ConfigError

PLAIN: dict[str, Any] = {"error_weight": "none", "max_drift": 100.0}


def batch_of(prediction: Tensor, advantage: float, std: float = 0.5, **others: Any) -> TokenBatch:
    """One decision of two tokens that reached (1, 0); the weights that acted predicted (0, 0)."""
    fields: dict[str, Any] = {
        "log_prob": row(-1.0, -1.0),
        "behavior_log_prob": row(-1.0, -1.0),
        "advantage": row(advantage, advantage),
        "mask": torch.ones(1, 2, dtype=torch.bool),
        "prediction": prediction,
        "behavior_prediction": row(0.0, 0.0),
        "reached": row(1.0, 0.0),
        "step_std": row(std),
        "velocity_weight": row(-0.5),
        "action_tokens": 1,
    }
    return TokenBatch(**(fields | others))


def softplus(value: float) -> float:
    return math.log1p(math.exp(value))


@pytest.mark.parametrize(
    ("advantage", "parameters", "expected"),
    [
        # E+ = (0.3 - 1)^2 = 0.49, E- = (-0.3 - 1)^2 = 1.69
        (1.0, {}, softplus(0.5 * (0.49 - 1.69))),
        (-1.0, {}, softplus(-0.5 * (0.49 - 1.69))),
        (0.0, {}, softplus(0.0)),
        (5.0, {}, softplus(0.5 * (0.49 - 1.69))),  # cut at max_advantage
        (0.5, {"max_advantage": 2.0}, softplus(0.5 * 0.25 * (0.49 - 1.69))),
        (1.0, {"preference_scale": 3.0}, softplus(1.5 * (0.49 - 1.69))),
        (1.0, {"form": "mse"}, 0.49),
        (-1.0, {"form": "mse"}, 1.69),
        (-1.0, {"form": "mse", "negative_weight": 0.2}, 0.338),
        (0.5, {"form": "mse"}, 0.75 * 0.49 + 0.25 * 1.69),
        (1.0, {"form": "mse", "scales_by_step": True, "step_size": 2.0}, 0.5 * 0.16),
        # the velocity has moved by 0.3 / 0.5 = 0.6; a sixth of it is left: E+ = 0.95^2
        (1.0, {"form": "mse", "max_drift": 0.1}, 0.9025),
        # 1 / (0.5^2 + 1e-4)
        (1.0, {"form": "mse", "error_weight": "noise"}, 0.49 / 0.2501),
    ],
)
def test_the_loss_of_a_decision(
    advantage: float, parameters: dict[str, Any], expected: float
) -> None:
    batch = batch_of(row(0.3, 0.0), advantage)
    losses, _ = loss_of("nft", **(PLAIN | parameters))(batch)
    assert losses.tolist() == [pytest.approx([expected / 2, expected / 2], rel=1e-6)]


def test_without_noise_errors_are_divided_by_their_mean_size() -> None:
    batch = batch_of(row(0.3, 0.0), 1.0, std=0.0)
    losses, _ = loss_of("nft", form="mse", max_drift=100.0)(batch)
    # 0.49 / ((0.7 + 0) / 2)
    assert float(losses.sum()) == pytest.approx(1.4, rel=1e-6)


def test_control_steps_may_be_compared_alone() -> None:
    batch = batch_of(row(0.3, 0.1), 1.0)
    losses, _ = loss_of("nft", nft_level="action", form="mse", **PLAIN)(batch)
    assert losses.tolist() == [pytest.approx([0.49, 0.01], rel=1e-6)]
    with pytest.raises(ValueError, match=r"needs TokenBatch\.action_tokens"):
        loss_of("nft", nft_level="action")(dataclasses.replace(batch, action_tokens=None))


@pytest.mark.parametrize("parameters", [{}, {"form": "mse"}, {"predicts": "actions"}])
def test_the_gradient_is_that_of_finite_differences(parameters: dict[str, Any]) -> None:
    batch = batch_of(row(0.3, -0.2), 0.4)
    loss = loss_of("nft", **(parameters | {"max_drift": 0.1}))

    def total(prediction: Tensor) -> Tensor:
        return loss(dataclasses.replace(batch, prediction=prediction))[0].sum()

    leaf = row(0.3, -0.2).requires_grad_()
    (found,) = torch.autograd.grad(total(leaf), leaf)
    torch.testing.assert_close(found, finite_differences(total, leaf), rtol=1e-6, atol=1e-7)


def test_what_stands_in_padding_changes_nothing() -> None:
    mask = torch.tensor([[True, False]])
    results = []
    for junk in (0.0, float("nan"), float("inf")):
        leaf = row(0.3, junk).requires_grad_()
        batch = batch_of(leaf, 1.0, mask=mask, behavior_prediction=row(0.0, junk))
        batch = dataclasses.replace(batch, reached=row(1.0, junk), advantage=row(1.0, junk))
        losses, diagnostics = loss_of("nft")(batch)
        (gradient,) = torch.autograd.grad(losses.sum(), leaf)
        results.append((losses.tolist(), gradient.tolist(), diagnostics.metrics()))
    assert results[0] == results[1] == results[2]
    assert results[0][0][0][1] == results[0][1][0][1] == 0.0


def test_a_masked_micro_batch_gives_zeros() -> None:
    leaf = row(0.3, 0.0).requires_grad_()
    losses, diagnostics = loss_of("nft")(
        batch_of(leaf, 1.0, mask=torch.zeros(1, 2, dtype=torch.bool))
    )
    (gradient,) = torch.autograd.grad(losses.sum(), leaf)
    assert not losses.any()
    assert not gradient.any()
    assert diagnostics.metrics() == {}


def test_the_exact_divergence_of_a_step_is_added_and_reported() -> None:
    # (0.3 - 0.1)^2 / (2 * 0.5^2) = 0.08, and 0 for the second number
    config = PolicyLossConfig(kl=KlLossConfig(coef=0.5, estimator="exact"))
    batch = batch_of(row(0.3, 0.2), 0.0, reference_log_prob=row(0.1, 0.2))
    losses, diagnostics = policy_loss(config)(batch)
    assert losses.tolist() == [pytest.approx([0.04, 0.0], abs=1e-9)]
    metrics = diagnostics.metrics()
    assert metrics["reference_kl"] == pytest.approx(0.04)
    # from the weights that acted: (0.3^2 + 0.2^2) / 0.5 / 2
    assert metrics["behavior_kl"] == pytest.approx(0.13)
    assert exact_kl(row(0.3), row(0.1), row(0.0)).tolist() == [[0.0]]


def test_a_batch_without_predictions_is_refused() -> None:
    batch = dataclasses.replace(batch_of(row(0.3, 0.0), 1.0), prediction=None)
    with pytest.raises(ValueError, match=r"nft needs TokenBatch\.prediction"):
        loss_of("nft")(batch)
    with pytest.raises(ValueError, match=r"step_std is \[1, 2\], expected \[1, 1\]"):
        batch_of(row(0.3, 0.0), 1.0, step_std=row(1.0, 1.0))


CLIPPED: dict[str, Any] = PLAIN | {"form": "mse", "nft_clip_ratio": 0.5}


@pytest.mark.parametrize(
    ("prediction", "advantage", "expected", "has_gradient"),
    [
        # the velocity has moved by 0.3 / 0.5 = 0.6, and may move by half of 0.8: the prediction by 0.2.
        # E+ = (0.3 - 1)^2 = 0.49 against (0.2 - 1)^2 = 0.64: the greater, which has no gradient
        (0.3, 1.0, 0.64, False),
        # E- = (-0.3 - 1)^2 = 1.69 against 1.44: going the wrong way costs whatever it is
        (0.3, -1.0, 1.69, True),
        # within the ratio nothing changes
        (0.1, 1.0, 0.81, True),
        # towards a worse prediction for a good decision
        (-0.3, 1.0, 1.69, True),
    ],
)
def test_a_loss_that_a_long_change_lowers_is_clipped(
    prediction: float, advantage: float, expected: float, has_gradient: bool
) -> None:
    given = row(prediction, 0.0).requires_grad_()
    batch = batch_of(given, advantage, behavior_velocity=row(0.0, 0.8))
    config = PolicyLossConfig(name="nft", **CLIPPED)
    losses, _ = policy_loss(config)(batch)
    loss = losses.sum()
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-5)
    loss.backward()
    assert given.grad is not None
    assert bool(given.grad.abs().sum() > 0.0) == has_gradient


def test_the_ratio_needs_the_old_velocity_and_the_form_that_reads_it() -> None:
    config = PolicyLossConfig(name="nft", **CLIPPED)
    with pytest.raises(ValueError, match="behavior_velocity"):
        policy_loss(config)(batch_of(row(0.3, 0.0), 1.0))
    with pytest.raises(ConfigError, match="expected none with form dpo"):
        PolicyLossConfig(name="nft", nft_clip_ratio=0.5)
