"""Ours beside siiRL's CPGD, which was run: the same numbers, and where they are meant to differ, by
how much.
"""

import pytest
import torch
from golden import Golden, all_compared

from vla_rl.algorithms import (
    AdvantageConfig,
    PolicyLossConfig,
    RewardBatch,
    advantage_estimator,
    policy_loss,
)

SIIRL = Golden("siirl")
ADVANTAGES = {"advantage/STD_weight": "grpo", "advantage/naive": "dr_grpo"}
DIFFERENT = {
    "loss/cpgd": "we take the log-ratio where siiRL takes the log-prob: another value, the same "
    "gradient",
    "advantage/clip_filter_like_weight": "we count groups above and below the line, siiRL "
    "trajectories above it",
}


def test_every_case_is_compared_or_said_to_differ() -> None:
    assert all_compared(SIIRL, ADVANTAGES, DIFFERENT)


def given(case: str) -> RewardBatch:
    batch = SIIRL.batch(case)
    return RewardBatch(
        rewards=batch["rewards"].numpy(), group=batch["group"].numpy(), mask=batch["mask"].numpy()
    )


@pytest.mark.parametrize("case", ADVANTAGES)
def test_advantages_are_those_of_siirl(case: str) -> None:
    found = advantage_estimator(AdvantageConfig(name=ADVANTAGES[case]))(given(case))
    SIIRL.assert_close(case, "advantage", found.advantage)


def test_the_filter_like_weight_is_one_where_every_group_teaches_and_siirls_is_trajectories_to_groups() -> (
    None
):
    case = "advantage/clip_filter_like_weight"
    ours = advantage_estimator(AdvantageConfig(name="cpgd_filter"))(given(case)).advantage
    SIIRL.assert_close(case, "advantage", ours * (7 / 3))


def test_cpgds_gradient_is_that_of_siirl_and_its_loss_is_zero_where_the_policies_agree() -> None:
    case = "loss/cpgd"
    loss = policy_loss(PolicyLossConfig(name="cpgd", clip_low=0.1, clip_high=0.15, drift_coef=0.0))
    log_prob = SIIRL.batch(case)["log_prob"].requires_grad_()
    batch = SIIRL.token_batch(case, log_prob)
    value = loss(batch)[0].sum() / batch.mask.sum()
    (gradient,) = torch.autograd.grad(value, log_prob)
    SIIRL.assert_close(case, "gradient", gradient)
    shift = (
        torch.where(batch.mask, batch.advantage * batch.behavior_log_prob, 0.0).sum()
        / batch.mask.sum()
    )
    SIIRL.assert_close(case, "loss", (value - shift).detach())
