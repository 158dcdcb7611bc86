"""Ours beside RLinf's functions, which were run: the same numbers, or the difference that is meant."""

import math

import numpy as np
import pytest
import torch
from golden import Golden, all_compared, reduced_over

from benchmarks.flow_nft import SPACES, NftCases
from vla_rl.algorithms import (
    KL_ESTIMATORS,
    AdvantageConfig,
    PolicyLossConfig,
    RewardBatch,
    advantage_estimator,
    aggregation,
    policy_loss,
)
from vla_rl.algorithms.losses import Diagnostics, TokenBatch, clipped_value_loss

RLINF = Golden("rlinf")

CLIPS = {"clip_low": 0.1, "clip_high": 0.15, "dual_clip": 1.2}

LEVELS = {"token_level": "token", "action_level": "action", "chunk_level": "chunk"}

KL = [f"kl/{name}" for name in ("k1", "abs", "k2", "k3")]

MODES = {
    "aggregation/token-mean": "token_mean",
    "aggregation/seq-mean-token-sum": "seq_mean_token_sum",
    "aggregation/seq-mean-token-mean": "seq_mean_token_mean",
    "aggregation/ratio": "seq_mean_token_mean",
}

EQUAL = ["gae/normalised=False", "grpo", "value", *KL, *MODES]

DIFFERENT = {
    "gae/normalised=True": "RLinf divides by std + 1e-5, we by the root of var + 1e-8",
    "reinpp": "RLinf whitens by the variance over n, we over n - 1",
    **{
        f"ppo/{level}": "RLinf's mean is over control steps or chunks, ours over their tokens"
        for level in LEVELS
    },
    **{
        f"decoupled/{level}": "the same, and RLinf's is over those that are kept"
        for level in LEVELS
    },
}


def test_every_case_is_compared_or_said_to_differ() -> None:
    assert all_compared(RLINF, EQUAL, DIFFERENT)


@pytest.mark.parametrize("is_whitened", [False, True])
def test_gae_is_that_of_rlinf_and_whitening_all_but(is_whitened: bool) -> None:
    case = f"gae/normalised={is_whitened}"
    batch, options = (
        {name: value.numpy() for name, value in RLINF.batch(case).items()},
        RLINF.options(case),
    )
    given = RewardBatch(
        rewards=batch["rewards"],
        step_rewards=batch["reward_by_token"],
        mask=batch["mask"],
        values=batch["old_values"],
        is_terminated=np.arange(len(batch["rewards"])) != options["cut_off_row"],
        final_values=np.full(len(batch["rewards"]), options["final_value"]),
    )
    config = AdvantageConfig(name="gae", gamma=0.9, lam=0.8, whiten=False)
    plain, on = advantage_estimator(config)(given), torch.from_numpy(batch["mask"])
    RLINF.assert_close(case, "returns", plain.returns, on)
    if not is_whitened:
        RLINF.assert_close(case, "advantage", plain.advantage, on)
        return
    whitened = advantage_estimator(AdvantageConfig(name="gae", gamma=0.9, lam=0.8))(given).advantage
    std = float(plain.advantage[batch["mask"]].std(ddof=1))
    RLINF.assert_close(case, "advantage", whitened * math.sqrt(std**2 + 1e-8) / (std + 1e-5), on)


@pytest.mark.parametrize(
    ("case", "name", "factor"), [("grpo", "grpo", 1.0), ("reinpp", "reinforce_plus_plus", None)]
)
def test_advantages_from_outcomes_are_those_of_rlinf(
    case: str, name: str, factor: float | None
) -> None:
    batch = {key: value.numpy()[:6] for key, value in RLINF.batch(case).items()}
    mask = batch["mask"] if case == "grpo" else np.ones_like(batch["mask"])
    given = RewardBatch(rewards=batch["rewards"], group=np.repeat([0, 1, 2], 2), mask=mask)
    found = advantage_estimator(AdvantageConfig(name=name))(given).advantage
    factor = math.sqrt(mask.size / (mask.size - 1)) if factor is None else factor
    RLINF.assert_close(case, "advantage", found * factor)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", ["ppo", "decoupled"])
def test_policy_losses_are_those_of_rlinf_once_the_means_are_over_the_same(
    name: str, level: str
) -> None:
    """Sums over tokens of ours, divided by RLinf's count: control steps or chunks, of decoupled
    losses those kept.
    """
    case = f"{name}/{level}"
    batch = RLINF.batch(case)
    is_chunk, num_rows = level == "chunk_level", len(batch["log_prob"])
    steps = (
        batch["step_mask"].all(1, keepdim=True).expand_as(batch["step_mask"])
        if is_chunk
        else batch["step_mask"]
    )
    mask = steps.repeat_interleave(2, dim=1)
    advantage = (
        batch["advantage_by_chunk"][:, None]
        if is_chunk
        else batch["advantage_by_step"].repeat_interleave(2, 1)
    )
    config = PolicyLossConfig(name="ppo", level=LEVELS[level], **CLIPS)
    if name == "decoupled":
        config = PolicyLossConfig(
            name="decoupled_ppo", level=LEVELS[level], behavior_weight_cap=1.15, **CLIPS
        )
    loss = policy_loss(config)

    def losses(log_prob: torch.Tensor) -> tuple[torch.Tensor, Diagnostics]:
        return loss(
            TokenBatch(
                log_prob=log_prob.reshape(num_rows, 6),
                behavior_log_prob=batch["behavior_log_prob"].reshape(num_rows, 6),
                proximal_log_prob=batch["proximal_log_prob"].reshape(num_rows, 6),
                advantage=advantage,
                mask=mask,
                action_tokens=2,
            )
        )

    # tokens that share a ratio are one of RLinf's units; at the token level its mean of plain PPO
    # is over control steps
    size = {"token_level": 2 if name == "ppo" else 1, "action_level": 2, "chunk_level": 6}[level]
    dropped = float(losses(batch["log_prob"])[1].num_dropped)
    assert (dropped > 0.0) is (name == "decoupled")
    num_units = (float(mask.sum()) - dropped) / size
    RLINF.assert_same_loss(
        case, lambda log_prob: losses(log_prob)[0].sum() / num_units, batch["log_prob"]
    )


def test_the_critics_loss_is_that_of_rlinf() -> None:
    batch = RLINF.batch("value")

    def loss(values: torch.Tensor) -> torch.Tensor:
        losses, _ = clipped_value_loss(
            values, batch["old_values"], batch["returns"], batch["mask"], clip=0.3, huber_delta=0.5
        )
        return reduced_over(aggregation("token_mean"), losses, batch["mask"])

    RLINF.assert_same_loss("value", loss, batch["values"])


@pytest.mark.parametrize("case", KL)
def test_estimates_of_the_divergence_and_their_gradients_are_those_of_rlinf(case: str) -> None:
    batch, estimator = RLINF.batch(case), KL_ESTIMATORS[case.split("/")[1]]

    def total(log_prob: torch.Tensor) -> torch.Tensor:
        return torch.where(
            batch["mask"], estimator(log_prob, batch["reference_log_prob"]), 0.0
        ).sum()

    RLINF.assert_same_loss(case, total, batch["log_prob"])


@pytest.mark.parametrize("case", MODES)
def test_aggregations_are_those_of_rlinf(case: str) -> None:
    batch, reduce = RLINF.batch(case), aggregation(MODES[case])
    RLINF.assert_same_loss(
        case, lambda losses: reduced_over(reduce, losses, batch["mask"]), batch["advantage"]
    )


GOLDEN = NftCases()


def test_losses_and_gradients_are_rlinfs() -> None:
    errors = GOLDEN.errors()
    assert len(errors) == 2 * len(GOLDEN.cases)
    assert max(errors.values()) <= 1e-4, errors


@pytest.mark.parametrize("name", GOLDEN.cases)
def test_a_masked_decision_has_no_gradient(name: str) -> None:
    _, gradient = GOLDEN.compute(name)
    is_counted = GOLDEN.arrays["in_mask"][:, 0]
    assert not gradient[~is_counted].any()
    assert gradient[is_counted].any()


def test_there_are_both_targets_and_both_losses() -> None:
    found = {(each["nft_target_space"], each["nft_loss_form"]) for each in GOLDEN.cases.values()}
    assert found == {(space, form) for space in SPACES for form in ("dpo", "mse")}
    assert len(GOLDEN.cases) == 25
