"""The loss of pi-StepNFT is that of RLinf 0.3.0, with its gradient by the velocity."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from vla_rl.algorithms.losses import PolicyLossConfig, TokenBatch, policy_loss
from vla_rl.models.flow.predictions import predict_step
from vla_rl.models.flow.transitions import Schedule

FOLDER = Path(__file__).parent
GOLDEN = np.load(FOLDER / "nft_rlinf.npz")
SETTINGS: dict[str, Any] = msgspec.json.decode((FOLDER / "nft_rlinf.json").read_bytes())
CASES: dict[str, dict[str, Any]] = SETTINGS["cases"]
SPACES = {"xnext": "next_state", "x0": "actions"}


def loss_config(case: dict[str, Any]) -> PolicyLossConfig:
    scale = case["nft_weight_scale"]
    form = case["nft_loss_form"]
    own = {"preference_scale": case["dpo_beta"]} if form == "dpo" else {}
    if isinstance(scale, list):
        own["negative_weight"] = scale[1] / scale[0]
    return PolicyLossConfig(
        name="nft",
        predicts=SPACES[case["nft_target_space"]],
        form=form,
        nft_level=case["nft_sum_type"].removesuffix("_level"),
        step_size=case["nft_beta"],
        max_drift=case["max_drift"],
        max_advantage=case["adv_clip_max"],
        error_weight="none" if case["nft_weight_mode"] == "constant" else "noise",
        **own,
    )


def make_batch(case: dict[str, Any], velocity: torch.Tensor) -> TokenBatch:
    x, old, following, end, advantages = (
        torch.from_numpy(GOLDEN[f"in_{name}"])
        for name in ("x_cur", "v_old", "x_next", "x0", "advantages")
    )
    step = torch.from_numpy(GOLDEN["in_step_index"])
    schedule = Schedule("flow_sde", SETTINGS["K"], case["lv"])
    space = SPACES[case["nft_target_space"]]
    now = predict_step(schedule, space, x, velocity, step)  # type: ignore[arg-type]
    before = predict_step(schedule, space, x, old, step)  # type: ignore[arg-type]
    mask = torch.from_numpy(GOLDEN["in_mask"]).expand(-1, 35)
    return TokenBatch(
        log_prob=torch.zeros(6, 35),
        behavior_log_prob=torch.zeros(6, 35),
        advantage=advantages,
        mask=mask,
        action_tokens=7,
        prediction=now.prediction.flatten(1),
        behavior_prediction=before.prediction.flatten(1),
        reached=(following if space == "next_state" else end).flatten(1),
        step_std=now.std[:, None],
        velocity_weight=now.velocity_weight[:, None],
    )


@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_are_rlinfs(name: str) -> None:
    case = CASES[name]
    velocity = torch.from_numpy(GOLDEN["in_v_theta"]).requires_grad_()
    batch = make_batch(case, velocity)
    losses, _ = policy_loss(loss_config(case))(batch)
    by_action = case["nft_sum_type"] == "action_level"
    num_units = 5 * (5 if by_action else 1)
    loss = losses.sum() / num_units
    (gradient,) = torch.autograd.grad(loss, velocity)
    torch.testing.assert_close(
        loss, torch.from_numpy(GOLDEN[f"out_loss_{name}"]), rtol=1e-4, atol=0.0
    )
    expected = torch.from_numpy(GOLDEN[f"out_grad_{name}"])
    distance = (gradient - expected).abs().max() / expected.abs().max()
    assert distance <= 1e-4
    assert not gradient[-1].any()  # masked


def test_there_are_both_targets_and_both_losses() -> None:
    found = {(each["nft_target_space"], each["nft_loss_form"]) for each in CASES.values()}
    assert found == {(space, form) for space in SPACES for form in ("dpo", "mse")}
    assert len(CASES) == 25
