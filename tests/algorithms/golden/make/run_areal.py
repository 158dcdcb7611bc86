"""Run AReaL's functions: the (decoupled) PPO loss at both levels with rejection sampling, SAPO,
M2PO, the critic, GAE.
"""

from types import SimpleNamespace
from typing import Any

from fakes import fake_packages

fake_packages(
    *(
        "aiofiles",
        "apscheduler",
        "awex",
        "boto3",
        "claude_agent_sdk",
        "etcd3",
        "fastapi",
        "gymnasium",
        "kubernetes",
    ),
    *(
        "langdetect",
        "lark",
        "litellm",
        "math_verify",
        "matplotlib",
        "mbridge",
        "mcp",
        "megatron",
        "nltk",
        "numba",
    ),
    *(
        "pebble",
        "prettytable",
        "pybase64",
        "pynvml",
        "seaborn",
        "sglang",
        "swanlab",
        "tensorboardX",
        "torchtitan",
        "trackio",
    ),
    *("uvicorn", "vllm"),
)

import torch  # noqa: E402
from areal.api.cli_args import NormConfig, RejectionSamplingConfig  # noqa: E402
from areal.trainer.ppo import actor  # noqa: E402
from areal.utils.data import KLEstimator, Normalization  # noqa: E402
from areal.utils.functional import functional  # noqa: E402
from recording import Recorder, loss_and_gradient  # noqa: E402
from torch import Tensor  # noqa: E402

FUNCTIONAL, ACTOR = "areal.utils.functional.functional", "areal.trainer.ppo.actor"
RECORDER = Recorder("areal", "inclusionAI/AReaL", "4aef98d8d818af55b43621aaadba047ae10f4e77")
BATCH = RECORDER.tensors(dtype=torch.float32)
MASK = BATCH["mask"]


def actor_losses() -> None:
    clips = {"eps_clip": 0.1, "eps_clip_higher": 0.15}
    by_token = {"level": "token", "action": "mask", "metric": "ratio", "upper": 1.15}
    cases: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
        "decoupled/token": ({**clips, "c_clip": 1.2}, by_token),
        "decoupled/sequence": ({**clips, "importance_sampling_level": "sequence"}, by_token),
        "sequence": ({**clips, "importance_sampling_level": "sequence"}, None),
        "truncated/token": (
            clips,
            {"level": "token", "action": "clamp", "metric": "ratio", "upper": 1.15},
        ),
    }
    for name, (options, rejection) in cases.items():
        advantage = "advantage_by_sequence" if "sequence" in name else "advantage"

        def loss(
            log_prob: Tensor, options=options, rejection=rejection, advantage=advantage
        ) -> Tensor:
            return functional.ppo_actor_loss_fn(
                logprobs=log_prob,
                proximal_logprobs=BATCH["proximal_log_prob"],
                old_logprobs=BATCH["behavior_log_prob"],
                advantages=BATCH[advantage],
                loss_mask=MASK,
                rejection_sampling=None
                if rejection is None
                else RejectionSamplingConfig(**rejection),
                **options,
            )[0]

        RECORDER.case(
            f"ppo/{name}",
            f"{FUNCTIONAL}.ppo_actor_loss_fn",
            loss_and_gradient(loss, BATCH["log_prob"]),
            rejection_sampling=rejection,
            advantage=advantage,
            **options,
        )
    for level, advantage in (("token", "advantage"), ("sequence", "advantage_by_sequence")):

        def sapo(log_prob: Tensor, level: str = level, advantage: str = advantage) -> Tensor:
            return functional.sapo_loss_fn(
                log_prob, BATCH["behavior_log_prob"], BATCH[advantage], 1.0, 1.05, MASK, level
            )[0]

        RECORDER.case(
            f"sapo/{level}",
            f"{FUNCTIONAL}.sapo_loss_fn",
            loss_and_gradient(sapo, BATCH["log_prob"]),
            tau_pos=1.0,
            tau_neg=1.05,
            importance_sampling_level=level,
            advantage=advantage,
        )
    for threshold in (0.02, 0.05, 1e-9):
        kept = actor._apply_m2po_masking(
            BATCH["behavior_log_prob"], BATCH["proximal_log_prob"], MASK, threshold
        )
        RECORDER.case(
            f"m2po/{threshold}",
            f"{ACTOR}._apply_m2po_masking",
            {"kept": kept},
            m2_threshold=threshold,
        )


def critic_losses() -> None:
    for kind in ("mse", "huber"):
        # its Huber loss has a delta of 10
        scale = 20.0 if kind == "huber" else 1.0

        def loss(values: Tensor, kind: str = kind, scale: float = scale) -> Tensor:
            return functional.ppo_critic_loss_fn(
                values,
                scale * BATCH["old_values"],
                scale * BATCH["returns"],
                0.3 * scale,
                MASK,
                kind,
            )[0]

        RECORDER.case(
            f"value/{kind}",
            f"{FUNCTIONAL}.ppo_critic_loss_fn",
            loss_and_gradient(loss, scale * BATCH["values"]),
            value_eps_clip=0.3 * scale,
            loss_fn_type=kind,
            scale=scale,
        )


def divergences() -> None:
    for name in ("k1", "k2", "k3"):
        for batch in ("ragged", "far"):
            tensors = RECORDER.tensors(batch, torch.float32)
            estimates = KLEstimator(name)(tensors["log_prob"], tensors["reference_log_prob"])
            RECORDER.case(
                f"kl/{name}/{batch}",
                "areal.utils.data.KLEstimator",
                {"estimates": estimates},
                batch=batch,
                kind=name,
            )


def advantages() -> None:
    levels = {
        "grpo": {"mean_level": "group", "std_level": "group", "std_unbiased": True, "eps": 1e-6},
        "dr_grpo": {"mean_level": "group", "std_level": None},
        "rloo": {"mean_level": "group", "std_level": None, "mean_leave1out": True},
    }
    rewards = BATCH["rewards"][:6]  # groups of two: sizes are fixed
    for name, fields in levels.items():
        norm = Normalization(NormConfig(group_size=2, **fields))
        RECORDER.case(
            f"reward_norm/{name}",
            "areal.utils.data.Normalization",
            {"advantage": norm(rewards)},
            rows=6,
            group_size=2,
            **fields,
        )
    whiten = {"mean_level": "batch", "std_level": "batch", "std_unbiased": True, "eps": 0.0}
    # one prompt token, answers that end before the batch's last column, so that all of them have
    # ended
    rows, tokens = MASK.shape
    attention = torch.cat(
        [torch.ones(rows, 1, dtype=torch.bool), MASK, torch.zeros(rows, 1, dtype=torch.bool)], 1
    )
    loss_mask = torch.cat([torch.zeros(rows, 1), MASK.float(), torch.zeros(rows, 1)], 1)
    # the value at column t is that before the token of column t + 1
    values = torch.cat([BATCH["old_values"], torch.zeros(rows, 2)], 1)
    for name, norm in (("gae", None), ("gae_whitened", Normalization(NormConfig(**whiten)))):
        config = SimpleNamespace(
            overlong_reward_penalty=False, use_decoupled_loss=True, recompute_logprob=True
        )
        ppo = SimpleNamespace(
            config=config,
            reward_bias=0.0,
            reward_scaling=1.0,
            reward_clip=20.0,
            reward_norm=None,
            kl_ctl=0.0,
        )
        ppo.kl_estimator, ppo.mask_no_eos_with_zero = KLEstimator("k1"), False
        ppo.discount, ppo.gae_lambda, ppo.adv_norm = 0.9, 0.8, norm
        data = {
            "input_ids": attention.long(),
            "attention_mask": attention,
            "loss_mask": loss_mask,
            "rewards": BATCH["rewards"].clone(),
            "logprobs": torch.zeros(rows, tokens + 2),
            "values": values,
        }
        found = actor.PPOActor._compute_advantages(ppo, data)
        outputs = {key: found[key][:, :tokens] for key in ("advantages", "returns")}
        options = {} if norm is None else {"adv_norm": whiten}
        RECORDER.case(
            f"{name}",
            f"{ACTOR}.PPOActor._compute_advantages",
            outputs,
            discount=0.9,
            gae_lambda=0.8,
            **options,
        )


if __name__ == "__main__":
    for part in (actor_losses, critic_losses, divergences, advantages):
        part()
    RECORDER.save()
