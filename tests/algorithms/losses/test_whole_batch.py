"""Check what a loss needs from every row of a mini-batch: chosen tokens, drifts and ratios of sequences."""

import dataclasses
import math

import pytest
import torch
from loss_batches import (
    batch_of,
    gradient,
    ratios_of,
    row,
)

from vla_rl.algorithms.losses import (
    CorrectionConfig,
    PolicyLossConfig,
    TokenBatch,
    chosen_tokens,
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
