"""Estimators of the KL divergence, in value and as a loss, and its penalty in the reward."""

import math

import numpy as np
import pytest
import torch

from vla_rl.algorithms import (
    KL_ESTIMATORS,
    KlRewardConfig,
    importance_weighted_k3,
    k1,
    k2,
    k3,
    k3_plus,
    mean_kl,
    next_kl_coef,
    penalised_rewards,
)
from vla_rl.errors import ConfigError


def test_the_estimators_by_hand_for_a_ratio_of_two() -> None:
    log_prob, reference = torch.tensor([0.0]), torch.tensor([math.log(2.0)])
    assert k1(log_prob, reference).item() == pytest.approx(-0.693147)
    assert k2(log_prob, reference).item() == pytest.approx(0.2402265)  # 0.693147^2 / 2
    assert k3(log_prob, reference).item() == pytest.approx(2.0 - 1.0 - 0.693147, abs=1e-6)


def test_equal_policies_are_at_distance_zero() -> None:
    same = torch.tensor([-0.1, -3.0])
    assert all(estimator(same, same).tolist() == [0.0, 0.0] for estimator in KL_ESTIMATORS.values())


def test_in_expectation_k1_and_k3_are_the_divergence_itself() -> None:
    policy, reference = (
        torch.tensor(p, dtype=torch.float64).log() for p in ([0.7, 0.2, 0.1], [0.3, 0.3, 0.4])
    )
    divergence = 0.7 * math.log(7 / 3) + 0.2 * math.log(2 / 3) + 0.1 * math.log(1 / 4)
    for estimator in (k1, k3):
        assert (policy.exp() * estimator(policy, reference)).sum().item() == pytest.approx(
            divergence
        )


def test_as_a_loss_k2_has_the_gradient_of_the_divergence_and_k1_has_none() -> None:
    reference = torch.tensor([0.3, 0.3, 0.4], dtype=torch.float64).log()

    def gradient(estimator) -> torch.Tensor:
        logits = torch.tensor([1.0, 0.0, -1.0], dtype=torch.float64, requires_grad=True)
        log_probs = torch.log_softmax(logits, dim=-1)
        expectation = (log_probs.detach().exp() * estimator(log_probs, reference)).sum()
        return torch.autograd.grad(expectation, logits)[0]

    logits = torch.tensor([1.0, 0.0, -1.0], dtype=torch.float64, requires_grad=True)
    log_probs = torch.log_softmax(logits, dim=-1)
    (wanted,) = torch.autograd.grad((log_probs.exp() * (log_probs - reference)).sum(), logits)
    torch.testing.assert_close(gradient(k2), wanted)
    torch.testing.assert_close(gradient(k1), torch.zeros_like(wanted))
    assert not torch.allclose(gradient(k3), wanted)


def test_far_policies_stay_finite() -> None:
    log_prob = torch.tensor([0.0], requires_grad=True)
    distant = torch.tensor([1000.0])
    assert k1(log_prob, distant).item() == -20.0
    assert k2(log_prob, distant).item() == 200.0
    assert k3(log_prob, distant).item() == 10.0
    for estimator in KL_ESTIMATORS.values():
        (found,) = torch.autograd.grad(estimator(log_prob, distant).sum(), log_prob)
        assert found.item() == 0.0


def test_half_precision_log_probs_give_float32_estimates() -> None:
    log_prob, reference = (
        torch.tensor([value], dtype=torch.bfloat16) for value in (-1.0, -1.0078125)
    )
    for estimator in KL_ESTIMATORS.values():
        found, exact = (
            estimator(log_prob, reference),
            estimator(log_prob.double(), reference.double()),
        )
        assert found.dtype is torch.float32
        torch.testing.assert_close(found.double(), exact, rtol=1e-2, atol=1e-7)
    weighted = importance_weighted_k3(log_prob, reference, reference)
    assert weighted.dtype is torch.float32


def test_k3_plus_has_the_value_of_k3_and_the_gradient_of_k2() -> None:
    log_prob = torch.tensor([0.0, -2.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.5, -2.5], dtype=torch.float64)
    value = k3_plus(log_prob, reference)
    torch.testing.assert_close(value, k3(log_prob, reference))
    (found,) = torch.autograd.grad(value.sum(), log_prob)
    assert found.tolist() == pytest.approx([-0.5, 0.5])  # log_prob - reference


def test_the_absolute_estimator_is_the_distance_of_log_probs() -> None:
    assert KL_ESTIMATORS["abs"](torch.tensor([0.0, -2.0]), torch.tensor([0.5, -2.5])).tolist() == [
        0.5,
        0.5,
    ]


def test_weighted_by_the_ratio_k3_is_the_divergence_of_the_present_policy_on_samples_of_an_older_one() -> (
    None
):
    policy, acted, reference = (
        torch.tensor(p, dtype=torch.float64).log()
        for p in ([0.7, 0.2, 0.1], [0.4, 0.4, 0.2], [0.5, 0.3, 0.2])
    )
    divergence = float((policy.exp() * (policy - reference)).sum())
    estimate = (acted.exp() * importance_weighted_k3(policy, acted, reference)).sum().item()
    assert estimate == pytest.approx(divergence)


def test_as_a_loss_on_older_samples_the_weighted_k3_has_the_gradient_of_the_divergence() -> None:
    acted, reference = (
        torch.tensor(p, dtype=torch.float64).log() for p in ([0.4, 0.4, 0.2], [0.5, 0.3, 0.2])
    )

    def gradient(estimate) -> torch.Tensor:
        logits = torch.tensor([1.0, 0.0, -1.0], dtype=torch.float64, requires_grad=True)
        return torch.autograd.grad(estimate(torch.log_softmax(logits, dim=-1)), logits)[0]

    wanted = gradient(lambda policy: (policy.exp() * (policy - reference)).sum())
    on_older = gradient(
        lambda policy: (acted.exp() * importance_weighted_k3(policy, acted, reference)).sum()
    )
    torch.testing.assert_close(on_older, wanted)
    # by hand for one token: rho = 2, d = log 2: d/dl rho k3 = rho k3 + rho (1 - e^d) = 2 (1 - log
    # 2) - 2
    token = torch.tensor([math.log(0.5)], dtype=torch.float64, requires_grad=True)
    behavior, anchor = token.detach() - math.log(2.0), token.detach() + math.log(2.0)
    (found,) = torch.autograd.grad(importance_weighted_k3(token, behavior, anchor).sum(), token)
    assert found.item() == pytest.approx(2.0 * (1.0 - math.log(2.0)) - 2.0)


def test_neither_the_policy_that_acted_nor_the_reference_gets_a_gradient() -> None:
    log_prob, behavior, reference = (
        torch.tensor([value], requires_grad=True) for value in (-1.0, -1.5, -0.5)
    )
    importance_weighted_k3(log_prob, behavior, reference).sum().backward()
    assert log_prob.grad is not None
    assert behavior.grad is None
    assert reference.grad is None


def test_each_step_pays_for_its_own_distance() -> None:
    mask = np.array([[True, True, False]])
    rewards, mean = penalised_rewards(
        np.array([[0.0, 1.0, 0.0]]), np.array([[0.5, 0.1, np.nan]]), mask, coef=0.2
    )
    np.testing.assert_allclose(rewards, [[-0.1, 0.98, 0.0]])
    assert mean == pytest.approx(0.3)


def test_nothing_to_pay_for_is_no_error() -> None:
    rewards, mean = penalised_rewards(
        np.zeros((0, 4)), np.zeros((0, 4)), np.zeros((0, 4), bool), coef=0.1
    )
    assert rewards.shape == (0, 4)
    assert mean == 0.0
    _, mean = penalised_rewards(
        np.zeros((1, 2)), np.full((1, 2), np.nan), np.zeros((1, 2), bool), coef=0.1
    )
    assert mean == 0.0


def test_a_fixed_weight_stays() -> None:
    assert next_kl_coef(KlRewardConfig(coef=0.001), 0.001, observed_kl=9.0, num_samples=64) == 0.001


def test_the_kl_of_an_update_is_a_mean_over_tokens_or_over_trajectories() -> None:
    # 10 tokens of 0.1 each, 1 token of 0.7, and an episode in which nothing was chosen
    kl, num_tokens = np.array([1.0, 0.7, 0.0]), np.array([10, 1, 0])
    assert mean_kl(kl, num_tokens, "tokens") == pytest.approx(1.7 / 11)
    assert mean_kl(kl, num_tokens, "trajectories") == pytest.approx((0.1 + 0.7) / 2)
    assert (
        mean_kl(kl[2:], num_tokens[2:], "tokens")
        == mean_kl(kl[2:], num_tokens[2:], "trajectories")
        == 0.0
    )


def test_an_adaptive_weight_follows_the_target_by_a_bounded_step() -> None:
    config = KlRewardConfig(coef=0.1, target=0.1, horizon=1000)
    assert next_kl_coef(config, 0.1, observed_kl=0.11, num_samples=100) == pytest.approx(
        0.1 * (1 + 0.1 * 0.1)
    )
    assert next_kl_coef(config, 0.1, observed_kl=9.0, num_samples=100) == pytest.approx(
        0.1 * (1 + 0.2 * 0.1)
    )
    assert next_kl_coef(config, 0.1, observed_kl=0.0, num_samples=100) == pytest.approx(
        0.1 * (1 - 0.2 * 0.1)
    )


def test_an_adaptive_weight_never_falls_to_nothing_however_many_samples_an_update_has() -> None:
    config = KlRewardConfig(coef=0.1, target=0.1, horizon=100)
    # 1 - 0.2 * 512 / 100 is below 0: it halves instead
    fallen = next_kl_coef(config, 0.1, observed_kl=0.0, num_samples=512)
    assert fallen == pytest.approx(0.05)
    assert next_kl_coef(config, fallen, observed_kl=9.0, num_samples=512) > fallen


def test_bad_input_is_refused_by_name() -> None:
    yes = np.ones((1, 2), bool)
    with pytest.raises(ValueError, match=r"kl of trajectory 0 at step 1 is nan"):
        penalised_rewards(np.zeros((1, 2)), np.array([[0.0, np.nan]]), yes, coef=0.1)
    with pytest.raises(
        ValueError, match=r"step_rewards is \[1, 3\] and kl \[1, 2\], expected \[1, 2\]"
    ):
        penalised_rewards(np.zeros((1, 3)), np.zeros((1, 2)), yes, coef=0.1)
    with pytest.raises(ConfigError, match=r"coef is 0.0, expected above 0 if a target adapts it"):
        KlRewardConfig(target=0.1)
