"""What a loss needs from a whole batch, and what is done about an engine and a trainer that disagree."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings, strategies as st
from small_batches import (
    batch_of,
    gradient,
    random_batch,
    ratios_of,
    row,
)

from vla_rl.algorithms.losses import (
    CorrectionConfig,
    PolicyLossConfig,
    TokenBatch,
    chosen_tokens,
    engine_correction,
    policy_loss,
    sequence_drift,
    sequence_log_ratio,
)


@pytest.mark.parametrize(
    "config",
    [
        PolicyLossConfig(
            name="clip_cov", covariance_share=0.5, covariance_low=0.5, covariance_high=5.0
        ),
        PolicyLossConfig(name="kl_cov", covariance_share=0.34),
        PolicyLossConfig(name="m2po", max_second_moment=0.07),
    ],
    ids=lambda config: config.name,
)
def test_tokens_chosen_beforehand_are_those_that_the_loss_chooses_among_all(
    config: PolicyLossConfig,
) -> None:
    batch = TokenBatch(
        log_prob=row(-3.0, -1.0, -1.0, -3.0).T,
        behavior_log_prob=row(-3.1, -1.0, -0.5, -3.0).T,
        advantage=row(-1.0, 1.0, -1.0, 1.0).T,
        mask=torch.ones(4, 1, dtype=torch.bool),
    )
    loss = policy_loss(config)
    given = dataclasses.replace(batch, chosen_tokens=chosen_tokens(config, batch))
    parts = [slice(0, 1), slice(1, 4)]
    whole, _ = loss(batch)
    torch.testing.assert_close(torch.cat([loss(given.rows(part))[0] for part in parts]), whole)
    assert not torch.equal(torch.cat([loss(batch.rows(part))[0] for part in parts]), whole)


def test_the_drift_of_a_sequence_is_the_mean_over_all_its_rows() -> None:
    batch = TokenBatch(
        log_prob=torch.cat([row(-1.3, -1.9), row(-1.6, 9.0), row(-0.5, 9.0)]),
        behavior_log_prob=torch.full((3, 2), -1.0, dtype=torch.float64),
        advantage=torch.ones(3, 1, dtype=torch.float64),
        mask=torch.tensor([[True, True], [True, False], [True, False]]),
    )
    told = sequence_drift(batch, torch.tensor([7, 7, 3]))
    torch.testing.assert_close(told, torch.tensor([[0.6], [0.6], [-0.5]], dtype=torch.float64))
    torch.testing.assert_close(sequence_drift(batch)[:, 0], row(0.6, 0.6, -0.5)[0])


def test_the_sequence_log_ratio_is_the_mean_over_all_rows_of_a_trajectory() -> None:
    batch = TokenBatch(
        log_prob=torch.cat([row(0.3, 0.9), row(0.6, 9.0), row(-1.0, 9.0)]),
        behavior_log_prob=torch.zeros(3, 2, dtype=torch.float64),
        advantage=torch.ones(3, 1, dtype=torch.float64),
        mask=torch.tensor([[True, True], [True, False], [True, False]]),
    )
    told = sequence_log_ratio(PolicyLossConfig(name="gspo"), batch, torch.tensor([7, 7, 3]))
    torch.testing.assert_close(told, torch.tensor([[0.6], [0.6], [-1.0]], dtype=torch.float64))
    # at most 0.4 each
    bounded = sequence_log_ratio(PolicyLossConfig(name="gmpo"), batch, torch.tensor([7, 7, 3]))
    torch.testing.assert_close(
        bounded[:, 0], row((0.3 + 0.4 + 0.4) / 3, (0.3 + 0.4 + 0.4) / 3, -1.0)[0]
    )


def test_where_the_ratio_is_against_the_trainers_own_log_probs_so_is_the_mean() -> None:
    batch = batch_of((4.0, 4.0), (1.0, 1.0), proximal_log_prob=ratios_of(2.0, 2.0))
    for config in (
        PolicyLossConfig(name="decoupled_ppo", level="sequence"),
        PolicyLossConfig(name="gspo", correction=CorrectionConfig(truncate="token")),
    ):
        assert sequence_log_ratio(config, batch, torch.tensor([0])).item() == pytest.approx(
            math.log(2)
        )
    assert sequence_log_ratio(
        PolicyLossConfig(name="gspo"), batch, torch.tensor([0])
    ).item() == pytest.approx(math.log(4))


def test_a_token_that_the_correction_dropped_takes_no_part_in_the_ratio_of_its_sequence() -> None:
    # kappa = 1, 1, 8: the third token is dropped, so log s = (log 1.2 + log 1.0) / 2
    batch = batch_of((1.2, 1.0, 16.0), (1.0, 1.0, 1.0), proximal_log_prob=ratios_of(1.0, 1.0, 8.0))
    config = PolicyLossConfig(
        name="gspo", clip_low=0.5, clip_high=0.5, correction=CorrectionConfig(mask="token")
    )
    losses, _ = policy_loss(config)(batch)
    torch.testing.assert_close(losses, row(-math.sqrt(1.2), -math.sqrt(1.2), 0.0))
    told = sequence_log_ratio(
        config, dataclasses.replace(batch, correction_weight=row(1.0, 1.0, 0.0)), torch.tensor([0])
    )
    assert told.item() == pytest.approx(math.log(1.2) / 2)


@pytest.mark.parametrize("name", ["gspo", "gmpo"])
def test_a_trajectory_cut_into_rows_has_the_loss_of_the_whole(name) -> None:
    whole = batch_of((1.3, 0.8, 1.1, 1.6), (1.0, 1.0, 1.0, 1.0))
    rows = TokenBatch(
        log_prob=whole.log_prob.detach().reshape(2, 2).requires_grad_(),
        behavior_log_prob=whole.behavior_log_prob.reshape(2, 2),
        advantage=whole.advantage.reshape(2, 2),
        mask=whole.mask.reshape(2, 2),
    )
    config = PolicyLossConfig(name=name, clip_low=0.3, clip_high=0.3)
    told = sequence_log_ratio(config, rows, torch.tensor([0, 0]))
    rows = TokenBatch(**(vars(rows) | {"sequence_log_ratio": told}))
    loss = policy_loss(config)
    torch.testing.assert_close(loss(rows)[0].reshape(1, 4), loss(whole)[0])
    torch.testing.assert_close(gradient(loss, rows).reshape(1, 4), gradient(loss, whole))


ALL = torch.ones(1, 3, dtype=torch.bool)


def weights(
    config: CorrectionConfig, kappas: tuple[float, ...], mask: torch.Tensor = ALL, **others
) -> torch.Tensor:
    return engine_correction(
        config, ratios_of(*kappas), torch.zeros(1, 3, dtype=torch.float64), mask, **others
    ).weight


def test_truncation_bounds_each_tokens_weight() -> None:
    found = weights(CorrectionConfig(truncate="token"), (0.5, 1.0, 4.0))
    torch.testing.assert_close(found, row(0.5, 1.0, 2.0))


def test_truncation_by_sequence_bounds_the_product() -> None:
    torch.testing.assert_close(
        weights(CorrectionConfig(truncate="sequence"), (0.5, 1.5, 2.0)), row(1.5, 1.5, 1.5)
    )
    bounded = weights(CorrectionConfig(truncate="sequence", truncate_at=5.0), (2.0, 2.0, 2.0))
    torch.testing.assert_close(bounded, row(5.0, 5.0, 5.0))


def test_masking_drops_tokens_or_whole_sequences() -> None:
    torch.testing.assert_close(
        weights(CorrectionConfig(mask="token"), (0.4, 1.0, 2.1)), row(0.0, 1.0, 0.0)
    )
    assert not weights(CorrectionConfig(mask="sequence"), (1.5, 1.5, 1.0)).any()  # product 2.25
    assert weights(CorrectionConfig(mask="sequence"), (4.0, 0.25, 1.0)).all()  # product 1
    # geometric mean 1.0132
    assert not weights(CorrectionConfig(mask="geometric"), (1.03, 1.01, 1.0)).any()
    assert weights(CorrectionConfig(mask="geometric"), (1.02, 1.0, 1.0)).all()  # 1.0066


def test_padding_counts_neither_in_a_geometric_mean_nor_in_a_product() -> None:
    # kappa 1.015 over two tokens, then padding: a mean over all three columns would be 1.00997,
    # inside of the bounds
    mask = torch.tensor([[True, True, False]])
    for padding in (1.0, 50.0):
        assert not weights(CorrectionConfig(mask="geometric"), (1.015, 1.015, padding), mask).any()
        within = weights(CorrectionConfig(mask="geometric"), (1.009, 1.009, padding), mask)
        torch.testing.assert_close(within, row(1.0, 1.0, 0.0))
        product = weights(CorrectionConfig(truncate="sequence"), (1.2, 1.2, padding), mask)
        torch.testing.assert_close(product, row(1.44, 1.44, 0.0))


def test_bounds_belong_to_the_interval() -> None:
    torch.testing.assert_close(
        weights(CorrectionConfig(mask="token"), (0.5, 2.0, 2.1)), row(1.0, 1.0, 0.0)
    )


def test_one_impossible_token_vetoes_its_whole_sequence() -> None:
    assert not weights(CorrectionConfig(veto_below=1e-4), (1.0, 1.0, 1e-5)).any()
    mask = torch.tensor([[True, True, False]])
    torch.testing.assert_close(
        weights(CorrectionConfig(veto_below=1e-4), (1.0, 1.0, 1e-5), mask), row(1.0, 1.0, 0.0)
    )
    just = float(ratios_of(1e-4).exp())
    assert weights(CorrectionConfig(veto_below=just), (1.0, 1.0, 1e-4)).all()


def test_masks_apply_before_truncation() -> None:
    both = CorrectionConfig(truncate="token", truncate_at=1.5, mask="token", mask_high=3.0)
    torch.testing.assert_close(weights(both, (1.0, 2.5, 4.0)), row(1.0, 1.5, 0.0))


def test_a_sequence_may_span_rows() -> None:
    proximal = torch.cat([ratios_of(2.0, 1.0), ratios_of(1.5, 9.0), ratios_of(1.0, 1.0)])
    mask = torch.tensor([[True, True], [True, False], [True, True]])
    found = engine_correction(
        CorrectionConfig(truncate="sequence", truncate_at=10.0),
        proximal,
        torch.zeros(3, 2, dtype=torch.float64),
        mask,
        sequence=torch.tensor([5, 5, 2]),
    )
    torch.testing.assert_close(
        found.weight, torch.cat([row(3.0, 3.0), row(3.0, 0.0), row(1.0, 1.0)])
    )
    assert float(found.diagnostics.num_sequences) == 2.0
    assert found.diagnostics.metrics()["engine_chi2_sequence"] == pytest.approx((9.0 + 1.0) / 2 - 1)


def test_the_diagnostics_by_hand() -> None:
    # kappa = 2, 0.5, (masked); d = log 2, -log 2; product 1
    mask = torch.tensor([[True, True, False]])
    zeros = torch.zeros(1, 3, dtype=torch.float64)
    metrics = engine_correction(
        CorrectionConfig(mask="token", mask_low=0.6), ratios_of(2.0, 0.5, 7.0), zeros, mask
    )
    assert metrics.diagnostics.metrics() == pytest.approx(
        {
            "log_prob_gap_mean": math.log(2),
            "log_prob_gap_max": math.log(2),
            "engine_kl_k1": 0.0,
            "engine_kl_k3": (2.5 - 2.0) / 2,
            "engine_chi2_token": (4.0 + 0.25) / 2 - 1,
            "engine_chi2_sequence": 0.0,
            "engine_ess": 2.5**2 / (2 * 4.25),
            "engine_dropped_fraction": 0.5,
        },
        abs=1e-12,
    )


def test_the_diagnostics_of_sequences_of_different_lengths_by_hand() -> None:
    # kappa 4, 1, 1 and 2 alone; the first is dropped: one token of four, in the first of two
    # sequences
    mask = torch.tensor([[True, True, True], [True, False, False]])
    proximal = torch.cat([ratios_of(4.0, 1.0, 1.0), ratios_of(2.0, 9.0, 9.0)])
    config = CorrectionConfig(mask="token", mask_high=3.0)
    told = engine_correction(
        config, proximal, torch.zeros(2, 3, dtype=torch.float64), mask
    ).diagnostics
    k1 = -(math.log(4) + math.log(2)) / 4
    assert told.metrics() == pytest.approx(
        {
            "log_prob_gap_mean": -k1,
            "log_prob_gap_max": math.log(4),
            "engine_kl_k1": k1,
            "engine_kl_k3": (8.0 - 4.0) / 4 + k1,
            "engine_chi2_token": (16.0 + 1.0 + 1.0 + 4.0) / 4 - 1,
            "engine_chi2_sequence": (16.0 + 4.0) / 2 - 1,
            "engine_ess": 8.0**2 / (4 * 22.0),
            "engine_dropped_fraction": 0.25,
        }
    )


def test_a_token_that_the_engine_found_impossible_has_a_bounded_weight() -> None:
    found = engine_correction(
        CorrectionConfig(truncate="token", truncate_at=1e12),
        row(-1.0, -1.0),
        row(-31.0, -1.0),
        ALL[:, :2],
    )
    torch.testing.assert_close(found.weight, row(math.exp(20.0), 1.0))
    assert found.diagnostics.metrics()["log_prob_gap_max"] == 20.0


def test_an_engine_that_agrees_loses_nothing_whatever_the_correction() -> None:
    batch = random_batch()
    for config in (
        CorrectionConfig(truncate="token", mask="geometric", veto_below=1e-4),
        CorrectionConfig(truncate="sequence", mask="sequence"),
        CorrectionConfig(mask="token"),
    ):
        found = engine_correction(
            config, batch.behavior_log_prob, batch.behavior_log_prob, batch.mask
        )
        torch.testing.assert_close(found.weight, batch.mask.double())
        metrics = found.diagnostics.metrics()
        assert metrics["engine_ess"] == pytest.approx(1.0)
        assert metrics["engine_chi2_token"] == pytest.approx(0.0)
        assert metrics["log_prob_gap_max"] == 0.0


@settings(max_examples=30, deadline=None)
@given(cut=st.integers(1, 5), seed=st.integers(0, 100))
def test_diagnostics_of_parts_add_up_to_those_of_the_whole(cut, seed) -> None:
    batch, config = random_batch(6, 4, seed=seed), CorrectionConfig(mask="geometric")
    assert batch.proximal_log_prob is not None

    def told(rows):
        return engine_correction(
            config, batch.proximal_log_prob[rows], batch.behavior_log_prob[rows], batch.mask[rows]
        ).diagnostics

    joined = told(slice(0, cut)) + told(slice(cut, 6))
    assert joined.metrics() == pytest.approx(told(slice(0, 6)).metrics())


def test_nothing_to_compare_has_no_metrics() -> None:
    nothing = torch.zeros(2, 3, dtype=torch.bool)
    nan = torch.full((2, 3), float("nan"))
    found = engine_correction(CorrectionConfig(truncate="token"), nan, nan, nothing)
    assert not found.weight.any()
    assert found.diagnostics.metrics() == {}
    assert (
        engine_correction(CorrectionConfig(), nan[:0], nan[:0], nothing[:0]).diagnostics.metrics()
        == {}
    )


def test_a_corrected_loss_takes_its_ratio_against_the_trainer_and_the_rest_as_a_weight() -> None:
    # behavior 0, proximal log 4 (weight min(4, 2) = 2), current log 5: ratio 1.25
    config = PolicyLossConfig(correction=CorrectionConfig(truncate="token"))
    losses, diagnostics = policy_loss(config)(
        batch_of((5.0,), (1.0,), proximal_log_prob=ratios_of(4.0))
    )
    torch.testing.assert_close(losses, row(-2.0 * 1.25))
    assert diagnostics.metrics()["ratio_mean"] == pytest.approx(1.25)
    assert diagnostics.metrics()["correction_weight_mean"] == pytest.approx(2.0)


def test_weights_made_over_the_whole_update_are_used_as_they_are() -> None:
    config = PolicyLossConfig(correction=CorrectionConfig(truncate="token"))
    batch = batch_of(
        (1.0, 1.0), (1.0, 1.0), proximal_log_prob=row(0.0, 0.0), correction_weight=row(0.5, 0.0)
    )
    losses, diagnostics = policy_loss(config)(batch)
    torch.testing.assert_close(losses, row(-0.5, 0.0))
    assert diagnostics.metrics()["correction_dropped_fraction"] == pytest.approx(0.5)


def test_a_correction_without_the_trainers_log_probs_says_what_is_missing() -> None:
    config = PolicyLossConfig(correction=CorrectionConfig(mask="token"))
    with pytest.raises(
        ValueError, match=r"PolicyLossConfig\.correction needs TokenBatch\.proximal_log_prob"
    ):
        policy_loss(config)(batch_of((1.0,), (1.0,)))
