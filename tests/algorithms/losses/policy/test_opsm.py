"""Check off-policy sequence masking against numbers worked out by hand."""

import math

import pytest
import torch
from loss_batches import (
    batch_of,
    loss_of,
    ratios_of,
    row,
)

from vla_rl.algorithms.losses import (
    CorrectionConfig,
    TokenBatch,
    sequence_drift,
)


def test_opsm_drops_bad_sequences_that_the_policy_has_left() -> None:
    # mean of behavior - current log-prob: row 0: log 2 / 2 > 0.1, row 1: -log 2 / 2
    batch = TokenBatch(
        log_prob=torch.cat(
            [ratios_of(0.5, 1.0), ratios_of(2.0, 1.0), ratios_of(0.5, 1.0)]
        ).requires_grad_(),
        behavior_log_prob=torch.zeros(3, 2, dtype=torch.float64),
        advantage=torch.tensor([[-1.0], [-1.0], [1.0]], dtype=torch.float64),
        mask=torch.ones(3, 2, dtype=torch.bool),
    )
    losses, diagnostics = loss_of("opsm", max_sequence_kl=0.1)(batch)
    torch.testing.assert_close(losses, torch.cat([row(0.0, 0.0), row(2.0, 1.0), row(-0.5, -1.0)]))
    assert diagnostics.metrics()["dropped_fraction"] == pytest.approx(1 / 3)


def test_opsm_keeps_good_sequences_and_those_at_the_bound() -> None:
    # the policy has halved every probability: a drift of log 2
    for advantage in (0.5, 0.0):
        losses, told = loss_of("opsm", max_sequence_kl=0.1)(
            batch_of((0.5, 0.5), (advantage, advantage))
        )
        torch.testing.assert_close(losses, row(*[-advantage * 0.5] * 2))
        assert told.metrics()["dropped_fraction"] == 0.0
    batch = batch_of((0.5, 0.5), (-1.0, -1.0))
    assert loss_of("opsm", max_sequence_kl=sequence_drift(batch).item())(batch)[0].all()
    # a token that the sampler found certain and the policy impossible counts as 20 nats
    far = TokenBatch(
        row(-50.0, -1.0), row(0.0, -1.0), row(1.0, 1.0), torch.ones(1, 2, dtype=torch.bool)
    )
    assert sequence_drift(far).item() == 10.0


def drifted(sampler: float, proximal: float) -> TokenBatch:
    """One bad sequence of two tokens, each of log-prob -1 now."""
    return TokenBatch(
        log_prob=row(-1.0, -1.0).requires_grad_(),
        behavior_log_prob=row(sampler, sampler),
        advantage=row(-1.0, -1.0),
        mask=torch.ones(1, 2, dtype=torch.bool),
        proximal_log_prob=row(proximal, proximal),
    )


def test_opsm_measures_the_drift_from_the_policy_that_sampled_also_under_a_correction() -> None:
    corrected = loss_of("opsm", max_sequence_kl=0.5, correction=CorrectionConfig(truncate="token"))
    far_from_the_engine, far_from_the_trainer = drifted(-0.3, -1.0), drifted(-1.0, -0.3)
    assert not corrected(far_from_the_engine)[0].any()
    assert corrected(far_from_the_trainer)[0].all()
    # the ratio of the surrogate is against the trainer's own log-probs, the rest is the weight
    # exp(-0.7)
    near = loss_of("opsm", max_sequence_kl=0.8, correction=CorrectionConfig(truncate="token"))
    torch.testing.assert_close(near(far_from_the_engine)[0], row(*[math.exp(-0.7)] * 2))


def test_by_default_opsm_drops_nothing_that_is_only_rounding_and_what_has_lost_a_tenth() -> None:
    noise = 0.03 * torch.randn(
        1000, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    behavior = torch.full((1000, 7), -1.0, dtype=torch.float64)
    mask = torch.ones(1000, 7, dtype=torch.bool)
    bad = -torch.ones(1000, 1, dtype=torch.float64)
    _, told = loss_of("opsm")(TokenBatch(behavior + noise, behavior, bad, mask))
    assert told.metrics()["dropped_fraction"] == 0.0
    _, told = loss_of("opsm")(TokenBatch(behavior - 0.11, behavior, bad, mask))
    assert told.metrics()["dropped_fraction"] == 1.0
