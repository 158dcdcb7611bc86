"""Run TRL's `GRPOTrainer._compute_loss` for its loss types, ratio levels, reference penalty and
sequence mask.
"""

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
from recording import Recorder, loss_and_gradient
from torch import Tensor
from trl.trainer.grpo_trainer import GRPOTrainer

RECORDER = Recorder(
    "trl",
    "huggingface/trl",
    "f2cd57710ae345ea6428ae95363267fcf38a3dc8",
    ("transformers", "accelerate"),
)
BATCH = RECORDER.tensors()
MASK = BATCH["mask"].double()
MAX_LENGTH = 12


def trainer(options: dict[str, Any], log_prob: Tensor) -> Any:
    """What `_compute_loss` reads of a trainer, with the model's answer put in."""
    settings = {
        "delta": None,
        "use_bias_correction_kl": False,
        "sapo_temperature_pos": 1.0,
        "sapo_temperature_neg": 1.05,
        "loss_type": "grpo",
        "importance_sampling_level": "token",
        "beta": 0.0,
        "epsilon_low": 0.1,
        "epsilon_high": 0.15,
        "off_policy_mask_threshold": None,
    } | options
    fields = {
        "args": SimpleNamespace(**settings),
        "aux_loss_enabled": False,
        "top_entropy_quantile": 1.0,
        "use_vllm": "corrected" in options,
        "vllm_importance_sampling_correction": "corrected" in options,
        "max_completion_length": MAX_LENGTH,
        "current_gradient_accumulation_steps": 1,
        "_entropy_bonus_enabled": False,
        "model": SimpleNamespace(training=True),
        "accelerator": SimpleNamespace(
            num_processes=1, gather=lambda tensor: tensor, reduce=lambda tensor, reduction: tensor
        ),
        "_metrics": {"train": defaultdict(list)},
        "get_off_policy_mask": GRPOTrainer.get_off_policy_mask,
        "_get_per_token_logps_and_entropies": lambda *args, **kwargs: (
            log_prob,
            torch.zeros_like(log_prob),
            None,
        ),
    }
    return SimpleNamespace(**(settings | fields))


def loss(log_prob: Tensor, advantage: str, options: dict[str, Any]) -> Tensor:
    rows, tokens = MASK.shape
    inputs = {
        "prompt_ids": torch.zeros(rows, 1, dtype=torch.long),
        "prompt_mask": torch.ones(rows, 1),
        "completion_ids": torch.zeros(rows, tokens, dtype=torch.long),
        "completion_mask": MASK,
        "advantages": BATCH[advantage],
        "old_per_token_logps": BATCH[
            "proximal_log_prob" if "corrected" in options else "behavior_log_prob"
        ],
        "ref_per_token_logps": BATCH["reference_log_prob"],
        "num_items_in_batch": MASK.sum(),
    }
    if "corrected" in options:
        inputs["sampling_per_token_logps"] = BATCH["behavior_log_prob"]
        kappa = ((BATCH["proximal_log_prob"] - BATCH["behavior_log_prob"]) * MASK).exp()
        inputs["importance_sampling_ratio"] = kappa.clamp(max=options["corrected"])
    return GRPOTrainer._compute_loss(trainer(options, log_prob), None, inputs)


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{
        f"loss/{kind}": ("advantage", {"loss_type": kind})
        for kind in ("grpo", "bnpo", "dr_grpo", "dapo")
    },
    "loss/dual_clip": ("advantage", {"loss_type": "dapo", "delta": 1.3}),
    "loss/cispo": ("advantage", {"loss_type": "cispo", "epsilon_high": 1.2}),
    "loss/sapo": ("advantage", {"loss_type": "sapo"}),
    "loss/gspo": ("advantage_by_sequence", {"importance_sampling_level": "sequence"}),
    "loss/reference": ("advantage", {"beta": 0.3}),
    "loss/reference_weighted": ("advantage", {"beta": 0.3, "use_bias_correction_kl": True}),
    "loss/opsm": ("advantage_by_sequence", {"off_policy_mask_threshold": 0.02}),
    "loss/opsm_corrected": (
        "advantage_by_sequence",
        {"off_policy_mask_threshold": 0.02, "corrected": 1.2},
    ),
    "loss/truncated": ("advantage", {"corrected": 1.2}),
}


if __name__ == "__main__":
    for name, (advantage, options) in CASES.items():
        found = loss_and_gradient(
            lambda log_prob, a=advantage, o=options: loss(log_prob, a, o), BATCH["log_prob"]
        )
        RECORDER.case(
            name,
            "trl.trainer.grpo_trainer.GRPOTrainer._compute_loss",
            found,
            advantage=advantage,
            **options,
        )
    RECORDER.save()
