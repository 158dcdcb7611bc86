"""The numbers of AReaL, siiRL, TRL, prime-rl, off-policy projects, as their own code computed them on the same
batches."""

import numpy as np
import pytest
import torch
from golden import Golden, all_compared, reduced_over

from benchmarks.off_policy_golden import PROJECTS
from vla_rl.algorithms import (
    KL_ESTIMATORS,
    AdvantageConfig,
    CorrectionConfig,
    KlLossConfig,
    PolicyLossConfig,
    RewardBatch,
    advantage_estimator,
    aggregation,
    policy_loss,
)
from vla_rl.algorithms.losses import chosen_tokens, clipped_value_loss

AREAL = Golden("areal")

CLIPS = {"clip_low": 0.1, "clip_high": 0.15}

AREAL_LOSSES = {
    "ppo/decoupled/token": PolicyLossConfig(
        name="decoupled_ppo", **CLIPS, dual_clip=1.2, behavior_weight_cap=1.15
    ),
    "ppo/decoupled/sequence": PolicyLossConfig(
        name="decoupled_ppo", **CLIPS, level="sequence", behavior_weight_cap=1.15
    ),
    "ppo/truncated/token": PolicyLossConfig(
        **CLIPS, correction=CorrectionConfig(truncate="token", truncate_at=1.15)
    ),
    "sapo/token": PolicyLossConfig(name="sapo"),
    "sapo/sequence": PolicyLossConfig(name="sapo", level="sequence"),
}

WITHOUT_REJECTION = "ppo/sequence"

M2PO = {"m2po/0.02": 0.02, "m2po/0.05": 0.05}

VALUES = {"value/mse": None, "value/huber": 10.0}

KL = ["kl/k1/ragged", "kl/k2/ragged", "kl/k3/ragged", "kl/k3/far"]

GROUPS = {"reward_norm/grpo": "grpo", "reward_norm/dr_grpo": "dr_grpo", "reward_norm/rloo": "rloo"}

GAE = {"gae": False, "gae_whitened": True}

AREAL_DIFFERENT = {
    "m2po/1e-09": "AReaL keeps the nearest token however far it is, we drop it",
    "kl/k1/far": "AReaL clamps the estimate to +-10, we the difference to +-20 and only k3 to 10",
    "kl/k2/far": "the same",
}


def test_every_case_of_areal_is_compared_or_said_to_differ() -> None:
    assert all_compared(
        AREAL, AREAL_LOSSES, [WITHOUT_REJECTION], M2PO, VALUES, KL, GROUPS, GAE, AREAL_DIFFERENT
    )


@pytest.mark.parametrize("case", AREAL_LOSSES)
def test_policy_losses_and_their_gradients_are_those_of_areal(case: str) -> None:
    advantage = AREAL.options(case)["advantage"]
    AREAL.assert_same_policy_loss(case, AREAL_LOSSES[case], "token_mean", advantage=advantage)


def test_without_rejection_the_sequence_ratio_is_gspos_around_the_trainers_own_log_probs() -> None:
    proximal = AREAL.batch(WITHOUT_REJECTION)["proximal_log_prob"]
    config = PolicyLossConfig(name="gspo", **CLIPS)
    AREAL.assert_same_policy_loss(
        WITHOUT_REJECTION,
        config,
        "token_mean",
        advantage="advantage_by_sequence",
        behavior_log_prob=proximal,
    )


@pytest.mark.parametrize("case", [*M2PO, "m2po/1e-09"])
def test_m2po_drops_the_tokens_that_areal_drops_but_for_the_last(case: str) -> None:
    batch, threshold = AREAL.batch(case), AREAL.options(case)["m2_threshold"]
    config = PolicyLossConfig(name="m2po", max_second_moment=threshold)
    ours = batch["mask"] & ~chosen_tokens(
        config, AREAL.token_batch(case, batch["proximal_log_prob"])
    )
    theirs = AREAL.output(case, "kept")
    if case in M2PO:
        assert torch.equal(ours, theirs)
        assert 0 < int(ours.sum()) < int(batch["mask"].sum())
    else:
        assert (int(ours.sum()), int(theirs.sum())) == (0, 1)


@pytest.mark.parametrize("case", VALUES)
def test_the_critics_loss_is_that_of_areal(case: str) -> None:
    batch, scale = AREAL.batch(case), AREAL.options(case)["scale"]

    def loss(values: torch.Tensor) -> torch.Tensor:
        losses, _ = clipped_value_loss(
            values,
            scale * batch["old_values"],
            scale * batch["returns"],
            batch["mask"],
            clip=0.3 * scale,
            huber_delta=VALUES[case],
        )
        return reduced_over(aggregation("token_mean"), losses, batch["mask"])

    AREAL.assert_same_loss(case, loss, scale * batch["values"])


@pytest.mark.parametrize("case", KL)
def test_estimates_of_the_divergence_are_those_of_areal(case: str) -> None:
    batch = AREAL.batch(case)
    estimator = KL_ESTIMATORS[case.split("/")[1]]
    AREAL.assert_close(case, "estimates", estimator(batch["log_prob"], batch["reference_log_prob"]))


@pytest.mark.parametrize("name", ["k1", "k2"])
def test_an_estimate_may_be_larger_than_areals_bound_of_10(name: str) -> None:
    case = f"kl/{name}/far"
    batch = AREAL.batch(case)
    ours, theirs = (
        KL_ESTIMATORS[name](batch["log_prob"], batch["reference_log_prob"]),
        AREAL.output(case, "estimates"),
    )
    torch.testing.assert_close(ours.clamp(-10.0, 10.0), theirs)
    assert float(ours.abs().max()) > 10.0


@pytest.mark.parametrize("case", GROUPS)
def test_advantages_of_groups_are_those_of_areal(case: str) -> None:
    rewards = AREAL.batch(case)["rewards"][:6].numpy()
    batch = RewardBatch(rewards=rewards, group=np.repeat([0, 1, 2], 2))
    AREAL.assert_close(
        case,
        "advantage",
        advantage_estimator(AdvantageConfig(name=GROUPS[case]))(batch).advantage[:, 0],
    )


@pytest.mark.parametrize("case", GAE)
def test_gae_is_that_of_areal(case: str) -> None:
    batch = {name: value.numpy() for name, value in AREAL.batch(case).items()}
    given = RewardBatch(
        rewards=batch["rewards"],
        mask=batch["mask"],
        values=batch["old_values"],
        is_terminated=np.ones(len(batch["rewards"]), dtype=bool),
    )
    found = advantage_estimator(AdvantageConfig(name="gae", gamma=0.9, lam=0.8, whiten=GAE[case]))(
        given
    )
    on = torch.from_numpy(batch["mask"])
    AREAL.assert_close(case, "advantages", found.advantage, on)
    AREAL.assert_close(case, "returns", found.returns, on)


SIIRL = Golden("siirl")

SIIRL_ADVANTAGES = {"advantage/STD_weight": "grpo", "advantage/naive": "dr_grpo"}

SIIRL_DIFFERENT = {
    "loss/cpgd": "we take the log-ratio where siiRL takes the log-prob: another value, the same "
    "gradient",
    "advantage/clip_filter_like_weight": "we count groups above and below the line, siiRL "
    "trajectories above it",
}


def test_every_case_of_siirl_is_compared_or_said_to_differ() -> None:
    assert all_compared(SIIRL, SIIRL_ADVANTAGES, SIIRL_DIFFERENT)


def given(case: str) -> RewardBatch:
    batch = SIIRL.batch(case)
    return RewardBatch(
        rewards=batch["rewards"].numpy(), group=batch["group"].numpy(), mask=batch["mask"].numpy()
    )


@pytest.mark.parametrize("case", SIIRL_ADVANTAGES)
def test_advantages_are_those_of_siirl(case: str) -> None:
    found = advantage_estimator(AdvantageConfig(name=SIIRL_ADVANTAGES[case]))(given(case))
    SIIRL.assert_close(case, "advantage", found.advantage)


def test_the_filter_like_weight_is_one_where_every_group_has_a_signal_and_siirls_is_trajectories_to_groups() -> (
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


TRL = Golden("trl")

PPO = PolicyLossConfig(**CLIPS)

TRUNCATE = CorrectionConfig(truncate="token", truncate_at=1.2)

TRL_LOSSES: dict[str, tuple[PolicyLossConfig, str]] = {
    "loss/grpo": (PPO, "seq_mean_token_mean"),
    "loss/bnpo": (PPO, "token_mean"),
    "loss/dr_grpo": (PPO, "seq_mean_token_sum_norm"),
    "loss/dapo": (PPO, "token_mean"),
    "loss/dual_clip": (PolicyLossConfig(**CLIPS, dual_clip=1.3), "token_mean"),
    "loss/cispo": (PolicyLossConfig(name="cispo", clip_low=1.0, clip_high=0.2), "token_mean"),
    "loss/sapo": (PolicyLossConfig(name="sapo"), "seq_mean_token_mean"),
    "loss/gspo": (PolicyLossConfig(name="gspo", **CLIPS), "seq_mean_token_mean"),
    "loss/reference": (
        PolicyLossConfig(**CLIPS, kl=KlLossConfig(coef=0.3, estimator="k3")),
        "seq_mean_token_mean",
    ),
    "loss/reference_weighted": (
        PolicyLossConfig(**CLIPS, kl=KlLossConfig(coef=0.3, estimator="importance_weighted_k3")),
        "seq_mean_token_mean",
    ),
    "loss/opsm": (
        PolicyLossConfig(name="opsm", **CLIPS, max_sequence_kl=0.02),
        "seq_mean_token_mean",
    ),
    "loss/opsm_corrected": (
        PolicyLossConfig(name="opsm", **CLIPS, max_sequence_kl=0.02, correction=TRUNCATE),
        "seq_mean_token_mean",
    ),
    "loss/truncated": (PolicyLossConfig(**CLIPS, correction=TRUNCATE), "seq_mean_token_mean"),
}


def test_every_case_of_trl_is_compared() -> None:
    assert all_compared(TRL, TRL_LOSSES)


@pytest.mark.parametrize("case", TRL_LOSSES)
def test_policy_losses_and_their_gradients_are_those_of_trl(case: str) -> None:
    config, mode = TRL_LOSSES[case]
    length = 12.0 if mode == "seq_mean_token_sum_norm" else None
    TRL.assert_same_policy_loss(
        case, config, mode, advantage=TRL.options(case)["advantage"], length=length
    )


PRIME = Golden("prime_rl")

PRIME_RL_LOSSES = {
    "loss/dppo": PolicyLossConfig(name="dppo"),
    "loss/dppo/narrow": PolicyLossConfig(
        name="dppo", probability_low=0.05, probability_high=0.08, penalty_coef=0.5
    ),
    "loss/ipo": PolicyLossConfig(name="ipo"),
    "loss/ipo/narrow": PolicyLossConfig(
        name="ipo", probability_low=0.05, probability_high=0.05, penalty_coef=0.5
    ),
}

PRIME_RL_ADVANTAGES = {"advantage/grpo": "dr_grpo", "advantage/max_rl": "max_rl"}


def test_every_case_of_prime_rl_is_compared() -> None:
    assert all_compared(PRIME, PRIME_RL_LOSSES, PRIME_RL_ADVANTAGES)


@pytest.mark.parametrize("case", PRIME_RL_LOSSES)
def test_policy_losses_and_their_gradients_are_those_of_prime_rl_with_its_defaults_and_others(
    case: str,
) -> None:
    PRIME.assert_same_policy_loss(case, PRIME_RL_LOSSES[case], "token_mean")


@pytest.mark.parametrize("case", PRIME_RL_ADVANTAGES)
def test_advantages_are_those_of_prime_rl(case: str) -> None:
    batch = PRIME.batch(case)
    given = RewardBatch(rewards=batch["rewards"].numpy(), group=batch["group"].numpy())
    found = advantage_estimator(AdvantageConfig(name=PRIME_RL_ADVANTAGES[case]))(given)
    PRIME.assert_close(case, "advantage", found.advantage[:, 0])


@pytest.mark.parametrize("project", PROJECTS)
def test_losses_and_gradients_are_those_of_the_project(project: str) -> None:
    differences = PROJECTS[project]()
    assert differences
    assert {name: value for name, value in differences.items() if not value <= 1e-5} == {}
