"""Check ratios of tokens, control steps and sequences."""

import math

import torch
from loss_batches import (
    gradient,
    row,
)

from vla_rl.algorithms.losses import (
    PolicyLossConfig,
    TokenBatch,
    policy_loss,
)


def test_ratios_of_sequences_and_control_steps_are_bounded_however_far_the_policy_went() -> None:
    far = TokenBatch(
        log_prob=row(0.0, 0.0).requires_grad_(),
        behavior_log_prob=row(-15.0, -15.0),
        advantage=row(-1.0, -1.0),
        mask=torch.ones(1, 2, dtype=torch.bool),
    )
    # a mean of 15 is cut at 10, a product of 30 at 20; what is cut has no gradient
    for config, expected in (
        (PolicyLossConfig(name="gspo"), math.exp(10.0)),
        (PolicyLossConfig(name="gmpo", clip_high=100.0), math.exp(10.0)),
        (PolicyLossConfig(level="chunk"), math.exp(20.0) / 2),
    ):
        torch.testing.assert_close(policy_loss(config)(far)[0], row(expected, expected))
        assert not gradient(policy_loss(config), far).any()
