"""Ours beside verl's functions, which were run: the same numbers, and where they are meant to
differ, by how much.
"""

from typing import Any

import numpy as np
import pytest
import torch
from golden import Golden, all_compared, reduced_over

from vla_rl.algorithms import (
    KL_ESTIMATORS,
    AdvantageConfig,
    CorrectionConfig,
    KlRewardConfig,
    PolicyLossConfig,
    RewardBatch,
    advantage_estimator,
    aggregation,
    engine_correction,
    mean_kl,
    next_kl_coef,
    penalised_rewards,
    policy_loss,
)
from vla_rl.algorithms.losses import clipped_value_loss

VERL = Golden("verl")
LENGTH = 12.0


def rewards_of(case: str, mask: str = "mask", group: Any = None, **fields: Any) -> RewardBatch:
    batch = {name: value.numpy() for name, value in VERL.batch(case).items()}
    return RewardBatch(
        rewards=batch["rewards"],
        group=batch["group"] if group is None else np.array(group),
        mask=batch[mask],
        values=batch["old_values"],
        is_terminated=np.ones(len(batch["rewards"]), dtype=bool),
        num_tokens=batch[mask].sum(1).astype(np.float64),
        greedy_rewards=batch["greedy_rewards"],
        **{name: batch[key] for name, key in fields.items()},
    )


STEPS = {"step_rewards": "reward_by_step"}
ADVANTAGES: dict[str, tuple[AdvantageConfig, str, dict[str, str]]] = {
    **{
        f"advantage/gae/{layout}": (AdvantageConfig(name="gae", gamma=0.9, lam=0.8), mask, STEPS)
        for layout, mask in (("padding", "mask"), ("holes", "holed_mask"))
    },
    **{
        f"advantage/remax/{layout}": (AdvantageConfig(name="remax"), mask, STEPS)
        for layout, mask in (("padding", "mask"), ("holes", "holed_mask"))
    },
    **{
        f"advantage/{name}/{layout}": (AdvantageConfig(name=name), mask, {})
        for name in ("opo", "reinforce_plus_plus_baseline")
        for layout, mask in (("padding", "mask"), ("holes", "holed_mask"))
    },
    "advantage/reinforce_plus_plus/padding": (
        AdvantageConfig(name="reinforce_plus_plus", gamma=0.9),
        "mask",
        STEPS,
    ),
    "advantage/grpo/std=True": (AdvantageConfig(name="grpo"), "mask", {}),
    "advantage/grpo/std=False": (AdvantageConfig(name="dr_grpo"), "mask", {}),
    "advantage/pass_at_k/std=True": (AdvantageConfig(name="pass_at_k"), "mask", {}),
    "advantage/pass_at_k/std=False": (
        AdvantageConfig(name="pass_at_k", normalise_std=False),
        "mask",
        {},
    ),
    "advantage/rloo": (AdvantageConfig(name="rloo"), "mask", {}),
    "advantage/rloo_vectorized": (AdvantageConfig(name="rloo"), "mask", {}),
}
PPO = PolicyLossConfig(name="ppo", clip_low=0.2, clip_high=0.28, dual_clip=1.5)
CISPO = PolicyLossConfig(name="cispo", clip_low=0.3, clip_high=0.3)
LOSSES: dict[str, tuple[PolicyLossConfig, str]] = {
    "loss/ppo/token-mean": (PPO, "token_mean"),
    "loss/ppo/seq-mean-token-sum": (PPO, "seq_mean_token_sum"),
    "loss/ppo/seq-mean-token-mean": (PPO, "seq_mean_token_mean"),
    "loss/cispo/token-mean": (CISPO, "token_mean"),
    "loss/cispo/seq-mean-token-sum": (CISPO, "seq_mean_token_sum"),
    "loss/gpg/token-mean": (PolicyLossConfig(name="gpg"), "token_mean"),
    "loss/sapo/seq-mean-token-mean": (PolicyLossConfig(name="sapo"), "seq_mean_token_mean"),
    "loss/gspo": (
        PolicyLossConfig(name="gspo", clip_low=0.05, clip_high=0.08),
        "seq_mean_token_mean",
    ),
    "loss/gmpo": (
        PolicyLossConfig(name="gmpo", clip_low=0.2, clip_high=0.2),
        "seq_mean_token_mean",
    ),
    "loss/clip_cov": (
        PolicyLossConfig(
            name="clip_cov", covariance_share=1.0, covariance_low=0.1, covariance_high=0.6
        ),
        "token_mean",
    ),
    "loss/kl_cov": (
        PolicyLossConfig(name="kl_cov", covariance_share=0.2, penalty_coef=0.7),
        "token_mean",
    ),
}
MODES = {
    "token-mean": "token_mean",
    "seq-mean-token-sum": "seq_mean_token_sum",
    "seq-mean-token-mean": "seq_mean_token_mean",
}
KL = [f"kl/{name}/ragged" for name in ("k1", "abs", "k2", "k3")] + ["kl/k3/far"]
TRUNCATED = {
    f"correction/truncate/{level}": CorrectionConfig(truncate=level, truncate_at=1.2)
    for level in ("token", "sequence")
}
MASKED = {
    "correction/mask/token_k1": CorrectionConfig(mask="token", mask_low=0.8, mask_high=1.25),
    "correction/mask/seq_sum_k1": CorrectionConfig(mask="sequence", mask_low=0.5, mask_high=2.0),
    # verl bounds the engine's probability over the trainer's, we the other way round
    "correction/mask/seq_mean_k1": CorrectionConfig(
        mask="geometric", mask_low=1 / 1.08, mask_high=1 / 0.95
    ),
}
DIFFERENT = {
    "advantage/reinforce_plus_plus/holes": "we carry the return over tokens that were not chosen, "
    "verl ends it there",
    "advantage/gpg": "we count trajectories of groups with signal, verl rewards other than 0",
    "advantage/grpo/lone_member": "we give 0, verl the raw reward",
    "advantage/rloo/lone_member": "we give 0, verl the raw reward",
    "loss/ppo/seq-mean-token-sum-norm": "we divide by the number of sequences too, as Dr. GRPO "
    "and TRL",
    "aggregation/seq-mean-token-sum-norm": "the same",
    "kl/k1/far": "we clamp the difference to +-20",
    "kl/abs/far": "the same",
    "kl/k2/far": "the same",
    "correction/loss/ppo": "we keep dropped tokens in the denominators, as AReaL, so that the "
    "rest is not weighed up",
    "correction/loss/gspo": "the same",
}


def test_every_case_is_compared_or_said_to_differ() -> None:
    others = (
        [f"value/{mode}" for mode in MODES]
        + [f"aggregation/{mode}" for mode in MODES]
        + ["kl_in_reward"]
    )
    assert all_compared(VERL, ADVANTAGES, LOSSES, KL, TRUNCATED, MASKED, DIFFERENT, others)


@pytest.mark.parametrize("case", ADVANTAGES)
def test_advantages_are_those_of_verl(case: str) -> None:
    config, mask, fields = ADVANTAGES[case]
    found, on = (
        advantage_estimator(config)(rewards_of(case, mask, **fields)),
        VERL.batch(case)[mask],
    )
    VERL.assert_close(case, "advantage", found.advantage, on)
    if found.returns is not None:
        VERL.assert_close(case, "returns", found.returns, on)


@pytest.mark.parametrize("case", LOSSES)
def test_policy_losses_and_their_gradients_are_those_of_verl(case: str) -> None:
    config, mode = LOSSES[case]
    advantage = VERL.options(case).get("advantage", "advantage")
    VERL.assert_same_policy_loss(case, config, mode, advantage=advantage)


@pytest.mark.parametrize("mode", MODES)
def test_the_critics_loss_is_that_of_verl(mode: str) -> None:
    case, reduce = f"value/{mode}", aggregation(MODES[mode])
    batch = VERL.batch(case)

    def loss(values: torch.Tensor) -> torch.Tensor:
        losses, _ = clipped_value_loss(
            values, batch["old_values"], batch["returns"], batch["mask"], clip=0.3
        )
        return reduced_over(reduce, losses, batch["mask"])

    VERL.assert_same_loss(case, loss, batch["values"])


@pytest.mark.parametrize("case", KL)
def test_estimates_of_the_divergence_and_their_gradients_are_those_of_verl(case: str) -> None:
    batch, estimator = VERL.batch(case), KL_ESTIMATORS[case.split("/")[1]]
    mask = batch.get("mask", torch.ones_like(batch["log_prob"]).bool())
    VERL.assert_close(case, "estimates", estimator(batch["log_prob"], batch["reference_log_prob"]))
    VERL.assert_same_loss(
        case,
        lambda log_prob: torch.where(
            mask, estimator(log_prob, batch["reference_log_prob"]), 0.0
        ).sum(),
        batch["log_prob"],
    )


def test_the_penalty_in_the_reward_and_its_adaptive_weight_are_those_of_verl() -> None:
    case = "kl_in_reward"
    batch = {name: value.numpy() for name, value in VERL.batch(case).items()}
    kl = batch["behavior_log_prob"] - batch["reference_log_prob"]
    rewards, _ = penalised_rewards(batch["outcome_by_token"], kl, batch["mask"], coef=0.2)
    VERL.assert_close(case, "rewards", rewards)
    config = KlRewardConfig(coef=0.2, target=0.5, horizon=100, average="trajectories")
    observed = mean_kl(
        np.where(batch["mask"], kl, 0.0).sum(1), batch["mask"].sum(1), config.average
    )
    VERL.assert_close(case, "kl", observed)
    VERL.assert_close(case, "next_coef", next_kl_coef(config, 0.2, observed, len(kl)))


@pytest.mark.parametrize("mode", MODES)
def test_aggregations_are_those_of_verl_also_without_the_tokens_of_a_response(mode: str) -> None:
    case, reduce = f"aggregation/{mode}", aggregation(MODES[mode])
    batch = VERL.batch(case)
    mask = batch["mask"].clone()
    mask[2] = False
    VERL.assert_same_loss(
        case, lambda losses: reduced_over(reduce, losses, mask), batch["advantage"]
    )


@pytest.mark.parametrize("case", [*TRUNCATED, *MASKED])
def test_corrections_are_those_of_verl(case: str) -> None:
    batch = VERL.batch(case)
    config = (TRUNCATED | MASKED)[case]
    weight = engine_correction(
        config, batch["proximal_log_prob"], batch["behavior_log_prob"], batch["mask"]
    ).weight
    if case in TRUNCATED:
        VERL.assert_close(case, "weight", weight)
    else:
        kept = weight > 0.0
        VERL.assert_close(case, "kept", kept.double())
        assert 0 < int(kept.sum()) < int(batch["mask"].sum())


def test_a_return_goes_on_beyond_tokens_that_were_not_chosen() -> None:
    case = "advantage/reinforce_plus_plus/holes"
    batch = VERL.batch(case)
    found = advantage_estimator(AdvantageConfig(name="reinforce_plus_plus", gamma=0.9))(
        rewards_of(case, "holed_mask", **STEPS)
    )
    assert found.returns is not None
    theirs, ours, reward = (
        VERL.output(case, "returns"),
        torch.from_numpy(found.returns),
        batch["reward_by_step"],
    )
    # row 0 has a hole at tokens 2 and 3
    assert float(theirs[0, 1]) == pytest.approx(float(reward[0, 1]))
    assert float(ours[0, 1]) == pytest.approx(float(reward[0, 1] + 0.9 * ours[0, 4]))
    torch.testing.assert_close(ours[0, 4:].double(), theirs[0, 4:], rtol=1e-6, atol=1e-9)


def test_gpg_counts_groups_with_signal_and_verl_rewards_that_are_not_zero() -> None:
    case = "advantage/gpg"
    ours = torch.from_numpy(
        advantage_estimator(AdvantageConfig(name="gpg"))(rewards_of(case)).advantage
    ).double()
    # one of seven rewards is 0; the groups of all seven differ within
    torch.testing.assert_close(ours * 7 / 6, VERL.output(case, "advantage"), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", ["grpo", "rloo"])
def test_a_lone_member_of_a_group_has_no_advantage_instead_of_its_reward(name: str) -> None:
    case = f"advantage/{name}/lone_member"
    group = [0, 0, 1, 2, 2, 2, 2]
    ours = advantage_estimator(AdvantageConfig(name=name))(rewards_of(case, group=group)).advantage
    theirs, reward = VERL.output(case, "advantage"), VERL.batch(case)["rewards"][2]
    assert not ours[2].any()
    assert float(theirs[2, 0]) == pytest.approx(float(reward), rel=1e-5)
    others = VERL.batch(case)["mask"].clone()
    others[2] = False
    VERL.assert_close(case, "advantage", ours, others)


def test_dr_grpos_constant_divides_a_mean_over_sequences_and_verls_a_sum() -> None:
    num_sequences = 7
    case = "loss/ppo/seq-mean-token-sum-norm"
    VERL.assert_same_policy_loss(
        case, PPO, "seq_mean_token_sum_norm", length=LENGTH, factor=num_sequences
    )
    case = "aggregation/seq-mean-token-sum-norm"
    batch = VERL.batch(case)
    mask = batch["mask"].clone()
    mask[2] = False
    reduce = aggregation("seq_mean_token_sum_norm")
    VERL.assert_same_loss(
        case,
        lambda losses: reduced_over(reduce, losses, mask, LENGTH),
        batch["advantage"],
        factor=num_sequences - 1,
    )


@pytest.mark.parametrize("name", ["k1", "abs", "k2"])
def test_policies_farther_apart_than_20_nats_count_as_20_nats_apart(name: str) -> None:
    case = f"kl/{name}/far"
    batch = VERL.batch(case)
    ours, theirs = (
        KL_ESTIMATORS[name](batch["log_prob"], batch["reference_log_prob"]),
        VERL.output(case, "estimates"),
    )
    near = (batch["reference_log_prob"] - batch["log_prob"]).abs() <= 20.0
    assert near.tolist() == [[True] * 7 + [False] * 2]
    torch.testing.assert_close(ours[near], theirs[near])
    assert (ours[~near].abs() < theirs[~near].abs()).all()


@pytest.mark.parametrize(("name", "mode"), [("ppo", "token_mean"), ("gspo", "seq_mean_token_mean")])
def test_a_corrected_loss_is_that_of_verl_but_for_the_tokens_that_the_mean_is_over(
    name: str, mode: str
) -> None:
    case = f"correction/loss/{name}"
    correction = CorrectionConfig(
        truncate="token", truncate_at=1.2, mask="token", mask_low=0.8, mask_high=1.25
    )
    loss = policy_loss(
        PolicyLossConfig(name=name, clip_low=0.05, clip_high=0.08, correction=correction)
    )
    batch, reduce, advantage = VERL.batch(case), aggregation(mode), VERL.options(case)["advantage"]
    kappa = (batch["proximal_log_prob"] - batch["behavior_log_prob"]).exp()
    kept = batch["mask"] & (kappa >= 0.8) & (kappa <= 1.25)
    assert int(kept.sum()) < int(batch["mask"].sum())

    def over_kept(log_prob: torch.Tensor) -> torch.Tensor:
        return reduced_over(reduce, loss(VERL.token_batch(case, log_prob, advantage))[0], kept)

    VERL.assert_same_loss(case, over_kept, batch["log_prob"])
