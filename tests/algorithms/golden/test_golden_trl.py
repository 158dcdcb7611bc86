"""Ours beside TRL's GRPO loss, which was run: the same numbers."""

import pytest
from golden import Golden, all_compared

from vla_rl.algorithms import CorrectionConfig, KlLossConfig, PolicyLossConfig

TRL = Golden("trl")
CLIPS = {"clip_low": 0.1, "clip_high": 0.15}
PPO = PolicyLossConfig(**CLIPS)
TRUNCATE = CorrectionConfig(truncate="token", truncate_at=1.2)
LOSSES: dict[str, tuple[PolicyLossConfig, str]] = {
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


def test_every_case_is_compared() -> None:
    assert all_compared(TRL, LOSSES)


@pytest.mark.parametrize("case", LOSSES)
def test_policy_losses_and_their_gradients_are_those_of_trl(case: str) -> None:
    config, mode = LOSSES[case]
    length = 12.0 if mode == "seq_mean_token_sum_norm" else None
    TRL.assert_same_policy_loss(
        case, config, mode, advantage=TRL.options(case)["advantage"], length=length
    )
