"""PPO's clipped surrogate against numbers worked out by hand, and batches that do not fit."""

import dataclasses
import math

import pytest
import torch
from loss_batches import batch_of, gradient, row

from vla_rl.algorithms.losses import TokenBatch, clipped_surrogate


def clipped(batch: TokenBatch, **changes):
    return clipped_surrogate(batch, **({"clip_low": 0.2, "clip_high": 0.28} | changes))


def test_each_side_is_clipped_only_where_it_would_profit() -> None:
    losses, diagnostics = clipped(
        batch_of((1.5, 0.5, 1.1, 1.5, 0.5, 1.0), (1.0, 1.0, 1.0, -1.0, -1.0, 2.0))
    )
    # A > 0: -min(rho, 1.28);  A < 0: max(rho, 0.8)
    torch.testing.assert_close(losses, row(-1.28, -0.5, -1.1, 1.5, 0.8, -2.0))
    assert diagnostics.metrics()["clip_fraction"] == pytest.approx(2 / 6)


def test_a_clipped_token_has_no_gradient_and_the_others_have_the_ratio_times_the_advantage() -> (
    None
):
    batch = batch_of((1.5, 0.5, 1.5, 0.5), (1.0, 1.0, -1.0, -1.0))
    torch.testing.assert_close(gradient(clipped, batch), row(0.0, -0.5, 1.5, 0.0))


def test_dual_clip_leaves_a_slightly_good_token_as_it_is() -> None:
    losses, _ = clipped(batch_of((1.0, 0.9), (0.5, 0.01)), dual_clip=3.0)
    torch.testing.assert_close(losses, row(-0.5, -0.009))


def test_the_diagnostics_by_hand() -> None:
    # log-ratios log 2 and -log 4; the third token does not count
    mask = torch.tensor([[True, True, False]])
    _, told = clipped(batch_of((2.0, 0.25, 9.0), (1.0, 1.0, 1.0), mask=mask))
    k1 = (-math.log(2.0) + math.log(4.0)) / 2
    assert told.metrics() == pytest.approx(
        {
            "ratio_mean": 1.125,
            "ratio_max": 2.0,
            "kl_k1": k1,
            "kl_k3": (2.25 - 2.0) / 2 + k1,
            "clip_fraction": 0.5,
            "dropped_fraction": 0.0,
        }
    )


def test_dual_clip_bounds_only_the_loss_of_bad_tokens() -> None:
    losses, diagnostics = clipped(batch_of((10.0, 2.0, 10.0), (-1.0, -1.0, 1.0)), dual_clip=3.0)
    torch.testing.assert_close(losses, row(3.0, 2.0, -1.28))
    assert diagnostics.metrics()["clip_fraction"] == pytest.approx(2 / 3)


def test_diagnostics_are_means_over_unmasked_tokens_only() -> None:
    mask = torch.tensor([[True, True, False]])
    metrics = clipped(batch_of((2.0, 0.5, 1000.0), (0.0, 0.0, 0.0), mask=mask))[1].metrics()
    assert metrics["ratio_mean"] == pytest.approx(1.25)
    assert metrics["ratio_max"] == pytest.approx(2.0)
    assert metrics["kl_k1"] == pytest.approx(0.0, abs=1e-7)  # -(log 2 + log 0.5) / 2
    assert metrics["kl_k3"] == pytest.approx(0.25)  # ((2 - 1) + (0.5 - 1) - 0) / 2
    assert metrics["clip_fraction"] == 0.0
    assert metrics["dropped_fraction"] == 0.0


def test_a_huge_log_ratio_is_clamped_before_it_overflows() -> None:
    batch = dataclasses.replace(batch_of((1.0,), (-1.0,)), log_prob=row(500.0).requires_grad_())
    losses, diagnostics = clipped(batch)
    assert losses.item() == pytest.approx(math.exp(20.0))
    assert gradient(clipped, batch).item() == 0.0
    assert math.isfinite(diagnostics.metrics()["ratio_max"])


def test_the_ratio_of_a_control_step_is_the_product_over_its_tokens_and_its_loss_is_shared() -> (
    None
):
    # two control steps of two tokens: ratios 1.2 * 1.2 = 1.44 (clipped at 1.28) and 1.1 * 1.0 = 1.1
    batch = batch_of((1.2, 1.2, 1.1, 1.0), (1.0, 1.0, 1.0, 1.0), action_tokens=2)
    losses, diagnostics = clipped(batch, level="action")
    torch.testing.assert_close(losses, row(-0.64, -0.64, -0.55, -0.55))
    assert diagnostics.metrics()["clip_fraction"] == pytest.approx(0.5)
    assert diagnostics.metrics()["ratio_mean"] == pytest.approx((1.44 + 1.1) / 2)
    torch.testing.assert_close(
        gradient(lambda b: clipped(b, level="action"), batch), row(0.0, 0.0, -1.1, -1.1)
    )


def test_a_masked_token_takes_no_part_in_the_ratio_of_its_control_step() -> None:
    mask = torch.tensor([[True, False]])
    losses, _ = clipped(
        batch_of((1.1, 7.0), (1.0, 1.0), action_tokens=2, mask=mask), level="action"
    )
    torch.testing.assert_close(losses, row(-1.1, 0.0))


def test_the_ratio_of_a_chunk_is_the_product_over_its_row() -> None:
    losses, _ = clipped(batch_of((1.1, 1.1, 1.0), (2.0, 2.0, 2.0)), level="chunk")
    torch.testing.assert_close(losses, row(*[-2.0 * 1.21 / 3] * 3))


def test_the_level_action_needs_to_know_how_many_tokens_a_control_step_has() -> None:
    with pytest.raises(ValueError, match=r"ratio level 'action' needs TokenBatch\.action_tokens"):
        clipped(batch_of((1.0, 1.0), (1.0, 1.0)), level="action")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"log_prob": torch.zeros(2, 4)}, r"log_prob is \[2, 4\], expected \[2, 3\]"),
        ({"behavior_log_prob": torch.zeros(3)}, r"behavior_log_prob is \[3\]"),
        ({"advantage": torch.zeros(2)}, r"advantage is \[2\], expected \[2, 3\] or \[2, 1\]"),
        ({"mask": torch.ones(2, 3)}, "mask is torch.float32"),
        ({"mask": torch.ones(3).bool()}, r"mask is torch.bool \[3\], expected torch.bool \[B, T\]"),
        ({"proximal_log_prob": torch.zeros(2, 1)}, r"proximal_log_prob is \[2, 1\]"),
        ({"reference_log_prob": torch.zeros(2, 1)}, r"reference_log_prob is \[2, 1\]"),
        ({"sequence_log_ratio": torch.zeros(2)}, r"sequence_log_ratio is \[2\], expected \[2, 1\]"),
        ({"correction_weight": torch.zeros(2)}, r"correction_weight is \[2\]"),
        ({"action_tokens": 2}, "a row has 3 tokens and action_tokens is 2"),
    ],
)
def test_a_batch_that_does_not_fit_is_refused_by_name(change, message) -> None:
    fields = {
        "log_prob": torch.zeros(2, 3),
        "behavior_log_prob": torch.zeros(2, 3),
        "advantage": torch.zeros(2, 3),
        "mask": torch.ones(2, 3).bool(),
    }
    with pytest.raises(ValueError, match=message):
        TokenBatch(**(fields | change))
