"""Check the covariance of log-probs and advantages by hand, and which tokens it chooses."""

import dataclasses

import pytest
import torch
from loss_batches import (
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
