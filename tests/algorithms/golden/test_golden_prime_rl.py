"""Ours beside prime-rl's functions, which were run: the same numbers."""

import pytest
from golden import Golden, all_compared

from vla_rl.algorithms import AdvantageConfig, PolicyLossConfig, RewardBatch, advantage_estimator

PRIME = Golden("prime_rl")
LOSSES = {
    "loss/dppo": PolicyLossConfig(name="dppo"),
    "loss/dppo/narrow": PolicyLossConfig(
        name="dppo", probability_low=0.05, probability_high=0.08, penalty_coef=0.5
    ),
    "loss/ipo": PolicyLossConfig(name="ipo"),
    "loss/ipo/narrow": PolicyLossConfig(
        name="ipo", probability_low=0.05, probability_high=0.05, penalty_coef=0.5
    ),
}
ADVANTAGES = {"advantage/grpo": "dr_grpo", "advantage/max_rl": "max_rl"}


def test_every_case_is_compared() -> None:
    assert all_compared(PRIME, LOSSES, ADVANTAGES)


@pytest.mark.parametrize("case", LOSSES)
def test_policy_losses_and_their_gradients_are_those_of_prime_rl_with_its_defaults_and_others(
    case: str,
) -> None:
    PRIME.assert_same_policy_loss(case, LOSSES[case], "token_mean")


@pytest.mark.parametrize("case", ADVANTAGES)
def test_advantages_are_those_of_prime_rl(case: str) -> None:
    batch = PRIME.batch(case)
    given = RewardBatch(rewards=batch["rewards"].numpy(), group=batch["group"].numpy())
    found = advantage_estimator(AdvantageConfig(name=ADVANTAGES[case]))(given)
    PRIME.assert_close(case, "advantage", found.advantage[:, 0])
