"""Compare the loss of pi-StepNFT with RLinf's, with its gradient by the velocity (`tests/algorithms/golden`).

`VLA_RL_GOLDEN_FLOW=FOLDER` compares another set of the same layout: `nft_rlinf.npz` and `nft_cases.json`.
"""

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import torch
from torch import Tensor

from vla_rl.algorithms.losses import PolicyLossConfig, TokenBatch, policy_loss
from vla_rl.algorithms.losses.token_batch import Predicted
from vla_rl.models.flow.predictions import predict_step
from vla_rl.models.flow.transitions import Schedule

OWN: Final = Path(__file__).parents[1] / "tests" / "algorithms" / "golden"
SPACES: Final[Mapping[str, Predicted]] = {"xnext": "next_state", "x0": "actions"}


class NftCases:
    """RLinf's cases: settings by name, inputs, and what its code returned."""

    def __init__(self) -> None:
        other = os.environ.get("VLA_RL_GOLDEN_FLOW")
        folder, file = (Path(other), "nft_cases.json") if other else (OWN, "nft_rlinf.json")
        settings = msgspec.json.decode((folder / file).read_bytes())
        self.num_steps: int = settings["K"]
        self.cases: dict[str, dict[str, Any]] = settings["cases"]
        with np.load(folder / "nft_rlinf.npz", allow_pickle=False) as held:
            self.arrays = {name: torch.from_numpy(held[name]) for name in held.files}

    def compute(self, name: str) -> tuple[Tensor, Tensor]:
        """Return the loss of a case, and its gradient by the velocity [B, H, D]."""
        case = self.cases[name]
        velocity = self.arrays["in_v_theta"].clone().requires_grad_()
        losses, _ = policy_loss(_loss_config(case))(self._make_batch(case, velocity))
        rows, horizon, _ = velocity.shape
        counted = int(self.arrays["in_mask"].expand(rows, 1).sum())
        by_action = case["nft_sum_type"] == "action_level"
        loss = losses.sum() / (counted * (horizon if by_action else 1))
        (gradient,) = torch.autograd.grad(loss, velocity)
        return loss.detach(), gradient

    def errors(self) -> dict[str, float]:
        """Return the relative difference of each loss and gradient by name; infinite for a NaN."""
        found: dict[str, float] = {}
        for name in self.cases:
            for kind, ours in zip(("loss", "grad"), self.compute(name), strict=True):
                expected = self.arrays[f"out_{kind}_{name}"]
                error = float((ours - expected).abs().max() / expected.abs().max())
                found[f"{kind}_{name}"] = math.inf if math.isnan(error) else error
        return found

    def _make_batch(self, case: dict[str, Any], velocity: Tensor) -> TokenBatch:
        x, old, following, end, advantages, step = (
            self.arrays[f"in_{name}"]
            for name in ("x_cur", "v_old", "x_next", "x0", "advantages", "step_index")
        )
        rows, horizon, width = velocity.shape
        schedule, space = (
            Schedule("flow_sde", self.num_steps, case["lv"]),
            SPACES[case["nft_target_space"]],
        )
        now = predict_step(schedule, space, x, velocity, step)
        before = predict_step(schedule, space, x, old, step)
        unused = torch.zeros(rows, horizon * width)
        return TokenBatch(
            log_prob=unused,
            behavior_log_prob=unused,
            advantage=advantages,
            mask=self.arrays["in_mask"].expand_as(unused),
            action_tokens=width,
            prediction=now.prediction.flatten(1),
            behavior_prediction=before.prediction.flatten(1),
            reached=(following if space == "next_state" else end).flatten(1),
            step_std=now.std[:, None],
            velocity_weight=now.velocity_weight[:, None],
        )


def _loss_config(case: dict[str, Any]) -> PolicyLossConfig:
    scale, form = case["nft_weight_scale"], case["nft_loss_form"]
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
