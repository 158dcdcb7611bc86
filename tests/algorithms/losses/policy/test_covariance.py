"""The covariance of log-probs and advantages by hand, and which tokens Clip-Cov and KL-Cov choose by it."""

import dataclasses
import math

import pytest
import torch
from small_batches import (
    batch_of,
    covariance_batch,
    loss_of,
    row,
)

from vla_rl.algorithms.losses import (
    PolicyLossConfig,
    TokenBatch,
    chosen_tokens,
)
from vla_rl.algorithms.losses.policy.covariance import token_covariance


def test_the_share_of_tokens_that_is_chosen_is_of_those_that_are_not_padding() -> None:
    # 4 tokens and 4 of padding: a share of 0.5 is 2 tokens
    short = covariance_batch()
    padded = TokenBatch(
        log_prob=torch.nn.functional.pad(short.log_prob, (0, 4), value=-9.0),
        behavior_log_prob=torch.nn.functional.pad(short.behavior_log_prob, (0, 4), value=-9.0),
        advantage=torch.nn.functional.pad(short.advantage, (0, 4), value=-9.0),
        mask=torch.nn.functional.pad(short.mask, (0, 4)),
    )
    for config in (
        PolicyLossConfig(name="clip_cov", covariance_share=0.5, covariance_low=-5.0),
        PolicyLossConfig(name="kl_cov", covariance_share=0.5),
    ):
        chosen = chosen_tokens(config, padded)
        assert int(chosen.sum()) == 2
        assert torch.equal(chosen[:, :4], chosen_tokens(config, short))
        assert not chosen[:, 4:].any()


def test_a_share_of_nothing_chooses_nothing_and_any_other_at_least_one_token() -> None:
    for share, chosen in ((0.0, 0), (1e-9, 1)):
        for config in (
            PolicyLossConfig(name="clip_cov", covariance_share=share, covariance_low=-5.0),
            PolicyLossConfig(name="kl_cov", covariance_share=share),
        ):
            assert int(chosen_tokens(config, covariance_batch()).sum()) == chosen


def test_padding_has_no_covariance_and_is_not_penalised_where_that_of_every_token_is_lower() -> (
    None
):
    # means -1.5 and 2: covariances -0.5 and -0.5; of the padding it would be (0 - 2) * (0 + 1.5)
    batch = TokenBatch(
        log_prob=row(-2.0, -1.0, -7.0),
        behavior_log_prob=row(-2.0, -1.0, -7.0),
        advantage=row(3.0, 1.0, 9.0),
        mask=torch.tensor([[True, True, False]]),
    )
    torch.testing.assert_close(token_covariance(batch), row(-0.5, -0.5, 0.0))
    config = PolicyLossConfig(name="kl_cov", covariance_share=0.5)
    # of equal ones the last
    assert chosen_tokens(config, batch).tolist() == [[False, True, False]]
    for name in ("kl_cov", "clip_cov"):
        assert loss_of(name)(batch)[1].metrics()["covariance"] == pytest.approx(-0.5)
    alone = dataclasses.replace(batch, mask=torch.tensor([[True, False, False]]))
    torch.testing.assert_close(token_covariance(alone), row(0.0, 0.0, 0.0))


def test_clip_cov_drops_a_share_of_the_tokens_of_high_covariance() -> None:
    loss = loss_of("clip_cov", covariance_share=0.25, covariance_low=0.5, covariance_high=5.0)
    losses, diagnostics = loss(covariance_batch())
    # one of the two candidates, the first
    torch.testing.assert_close(losses, row(0.0, -1.0, 1.0, -1.0))
    assert diagnostics.metrics()["dropped_fraction"] == pytest.approx(0.25)
    both = loss_of("clip_cov", covariance_share=0.5, covariance_low=0.5, covariance_high=5.0)
    torch.testing.assert_close(both(covariance_batch())[0], row(0.0, 0.0, 1.0, -1.0))


def test_clip_covs_candidates_are_unmasked_unclipped_and_strictly_between_the_bounds() -> None:
    # means over the five unmasked tokens: log-prob -2, advantage 0; covariances 1, 0.5, 0, 1, -2.5
    # and of the masked one 6
    log_prob = row(-3.0, -2.5, -2.0, -1.0, -1.5, 0.0)
    batch = TokenBatch(
        log_prob=log_prob.clone().requires_grad_(),
        # the fourth token's ratio is 1.5, beyond the clip of a good token
        behavior_log_prob=log_prob - row(0.0, 0.0, 0.0, math.log(1.5), 0.0, 0.0),
        advantage=row(-1.0, -1.0, 6.0, 1.0, -5.0, 3.0),
        mask=torch.tensor([[True] * 5 + [False]]),
    )
    covariance = token_covariance(batch)
    torch.testing.assert_close(covariance, row(1.0, 0.5, 0.0, 1.0, -2.5, 0.0))

    def dropped(low: float, high: float) -> list[int]:
        config = PolicyLossConfig(
            name="clip_cov",
            covariance_share=1.0,
            covariance_low=low,
            covariance_high=high,
            clip_high=0.28,
        )
        return chosen_tokens(config, batch)[0].nonzero()[:, 0].tolist()

    assert dropped(-9.0, 9.0) == [0, 1, 2, 4]  # neither the clipped nor the masked token
    assert dropped(0.5, 9.0) == [0]  # a covariance at the bound is no candidate
    assert dropped(0.0, 1.0) == [1]
    assert dropped(-9.0, 0.25) == [2, 4]


def test_candidates_are_taken_evenly_spaced() -> None:
    log_prob = row(*[-1.0] * 8)
    batch = TokenBatch(log_prob, log_prob, row(*[1.0] * 8), torch.ones(1, 8, dtype=torch.bool))
    # 3 of 8 candidates
    config = PolicyLossConfig(name="clip_cov", covariance_share=0.375, covariance_low=-1.0)
    assert chosen_tokens(config, batch)[0].nonzero()[:, 0].tolist() == [0, 2, 5]


def test_clip_cov_without_a_candidate_is_ppo() -> None:
    losses, diagnostics = loss_of("clip_cov", covariance_share=1.0, covariance_low=2.0)(
        covariance_batch()
    )
    torch.testing.assert_close(losses, row(1.0, -1.0, 1.0, -1.0))
    assert diagnostics.metrics()["dropped_fraction"] == 0.0


def test_kl_cov_penalises_the_tokens_of_the_highest_covariance() -> None:
    # means: log-prob 0, advantage 0 -> covariances 2 log 2, -log 2 and 0
    batch = batch_of((2.0, 0.5, 1.0), (2.0, 1.0, -3.0))
    losses, diagnostics = loss_of("kl_cov", covariance_share=0.34, penalty_coef=0.1)(batch)
    torch.testing.assert_close(losses, row(-4.0 + 0.1 * math.log(2), -0.5, 3.0))
    assert diagnostics.metrics()["penalised_fraction"] == pytest.approx(1 / 3)
