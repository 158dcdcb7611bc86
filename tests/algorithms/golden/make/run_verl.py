"""Run verl's functions on the ragged batch: advantages, policy losses, KL, aggregation, rollout
correction.
"""

import torch
import verl.trainer.ppo.core_algos as core
from recording import Recorder, loss_and_gradient
from torch import Tensor
from verl import DataProto
from verl.trainer.ppo import rollout_corr_helper
from verl.trainer.ppo.ray_trainer import apply_kl_penalty
from verl.workers.config import ActorConfig
from verl.workers.config.actor import PolicyLossConfig

CORE, CORRECTION = "verl.trainer.ppo.core_algos", "verl.trainer.ppo.rollout_corr_helper"
RECORDER = Recorder(
    "verl",
    "volcengine/verl",
    "b178a3cd56f58b2d502255daba591e92833930a7",
    ("tensordict", "transformers", "ray"),
)
BATCH = RECORDER.tensors()
MASK, HOLED = BATCH["mask"].double(), BATCH["holed_mask"].double()
MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
LENGTH = 12
"""`loss_scale_factor` of seq-mean-token-sum-norm."""


class Options(dict[str, object]):
    """A config with items and attributes."""

    __getattr__ = dict.__getitem__


def advantages() -> None:
    index, outcome = BATCH["group"].numpy(), BATCH["outcome_by_token"]

    def record(name: str, function: str, found: tuple[Tensor, Tensor], **options: object) -> None:
        RECORDER.case(
            f"advantage/{name}",
            f"{CORE}.{function}",
            {"advantage": found[0], "returns": found[1]},
            **options,
        )

    gamma, lam = 0.9, 0.8
    for layout, mask in (("padding", MASK), ("holes", HOLED)):
        found = core.compute_gae_advantage_return(
            BATCH["reward_by_step"], BATCH["old_values"], mask, gamma, lam
        )
        record(
            f"gae/{layout}",
            "compute_gae_advantage_return",
            found,
            gamma=gamma,
            lam=lam,
            mask=layout,
        )
        config = Options(gamma=gamma)
        found = core.compute_reinforce_plus_plus_outcome_advantage(
            BATCH["reward_by_step"], mask, config=config
        )
        record(
            f"reinforce_plus_plus/{layout}",
            "compute_reinforce_plus_plus_outcome_advantage",
            found,
            gamma=gamma,
            mask=layout,
        )
        found = core.compute_remax_outcome_advantage(
            BATCH["reward_by_step"], BATCH["greedy_rewards"], mask
        )
        record(f"remax/{layout}", "compute_remax_outcome_advantage", found, mask=layout)
        found = core.compute_opo_outcome_advantage(outcome.clone(), mask, index)
        record(f"opo/{layout}", "compute_opo_outcome_advantage", found, mask=layout)
        found = core.compute_reinforce_plus_plus_baseline_outcome_advantage(
            outcome.clone(), mask, index
        )
        record(
            f"reinforce_plus_plus_baseline/{layout}",
            "compute_reinforce_plus_plus_baseline_outcome_advantage",
            found,
            mask=layout,
        )
    for by_std in (True, False):
        found = core.compute_grpo_outcome_advantage(
            outcome.clone(), MASK, index, norm_adv_by_std_in_grpo=by_std
        )
        record(
            f"grpo/std={by_std}",
            "compute_grpo_outcome_advantage",
            found,
            norm_adv_by_std_in_grpo=by_std,
            epsilon=1e-6,
        )
        config = Options(norm_adv_by_std_in_grpo=by_std)
        found = core.compute_grpo_passk_outcome_advantage(
            outcome.clone(), MASK, index, config=config
        )
        record(
            f"pass_at_k/std={by_std}",
            "compute_grpo_passk_outcome_advantage",
            found,
            norm_adv_by_std_in_grpo=by_std,
        )
    record(
        "rloo",
        "compute_rloo_outcome_advantage",
        core.compute_rloo_outcome_advantage(outcome.clone(), MASK, index),
    )
    found = core.compute_rloo_vectorized_outcome_advantage(outcome.clone(), MASK, index)
    record("rloo_vectorized", "compute_rloo_vectorized_outcome_advantage", found)
    record(
        "gpg",
        "compute_gpg_outcome_advantage",
        core.compute_gpg_outcome_advantage(outcome.clone(), MASK, index),
    )
    alone = torch.tensor([0, 0, 1, 2, 2, 2, 2]).numpy()
    found = core.compute_grpo_outcome_advantage(outcome.clone(), MASK, alone)
    record("grpo/lone_member", "compute_grpo_outcome_advantage", found, group=alone.tolist())
    found = core.compute_rloo_outcome_advantage(outcome.clone(), MASK, alone)
    record("rloo/lone_member", "compute_rloo_outcome_advantage", found, group=alone.tolist())


def actor(**fields: object) -> ActorConfig:
    batch_info = {"loss_scale_factor": LENGTH}
    return ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        global_batch_info=batch_info,
        **fields,
    )


def policy_loss(
    name: str,
    mode: str,
    *,
    advantage: str = "advantage",
    weights: Tensor | None = None,
    **fields: object,
):
    """The loss of a registered mode, as a function of the current log-probs."""
    config, function = actor(**fields), core.get_policy_loss_fn(name)

    def loss(log_prob: Tensor) -> Tensor:
        return function(
            BATCH["behavior_log_prob"], log_prob, BATCH[advantage], MASK, mode, config, weights
        )[0]

    return loss


def policy_losses() -> None:
    clips = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28}
    cases: list[tuple[str, str, str, dict[str, object]]] = [
        *(("ppo", "vanilla", mode, {**clips, "clip_ratio_c": 1.5}) for mode in MODES),
        *(
            ("cispo", "cispo", mode, {"clip_ratio_low": 0.3, "clip_ratio_high": 0.3})
            for mode in MODES[:2]
        ),
        ("gpg", "gpg", "token-mean", {}),
        ("sapo", "sapo", "seq-mean-token-mean", {"tau_pos": 1.0, "tau_neg": 1.05}),
    ]
    for name, registered, mode, fields in cases:
        found = loss_and_gradient(policy_loss(registered, mode, **fields), BATCH["log_prob"])
        RECORDER.case(f"loss/{name}/{mode}", f"{CORE}.{registered}", found, mode=mode, **fields)
    by_sequence = {
        "gspo": ("gspo", {"clip_ratio_low": 0.05, "clip_ratio_high": 0.08}),
        "gmpo": ("geo_mean", {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2}),
    }
    for name, (registered, fields) in by_sequence.items():
        loss = policy_loss(
            registered, "seq-mean-token-mean", advantage="advantage_by_sequence", **fields
        )
        found = loss_and_gradient(loss, BATCH["log_prob"])
        RECORDER.case(
            f"loss/{name}",
            f"{CORE}.{registered}",
            found,
            advantage="advantage_by_sequence",
            **fields,
        )
    # every candidate is taken (ratio 1), because verl draws them at random
    numbers = {"clip_cov_ratio": 1.0, "clip_cov_lb": 0.1, "clip_cov_ub": 0.6}
    loss = policy_loss("clip_cov", "token-mean", policy_loss=PolicyLossConfig(**numbers), **clips)
    RECORDER.case(
        "loss/clip_cov",
        f"{CORE}.clip_cov",
        loss_and_gradient(loss, BATCH["log_prob"]),
        **clips,
        **numbers,
    )
    numbers = {"kl_cov_ratio": 0.2, "ppo_kl_coef": 0.7}
    loss = policy_loss("kl_cov", "token-mean", policy_loss=PolicyLossConfig(**numbers))
    RECORDER.case(
        "loss/kl_cov", f"{CORE}.kl_cov", loss_and_gradient(loss, BATCH["log_prob"]), **numbers
    )
    for mode in MODES[:3]:

        def value_loss(values: Tensor, mode: str = mode) -> Tensor:
            return core.compute_value_loss(
                values, BATCH["returns"], BATCH["old_values"], MASK, 0.3, mode
            )[0]

        found = loss_and_gradient(value_loss, BATCH["values"])
        RECORDER.case(
            f"value/{mode}", f"{CORE}.compute_value_loss", found, mode=mode, cliprange_value=0.3
        )


def divergences() -> None:
    for name in ("k1", "abs", "k2", "k3"):  # "k3+" raises NotImplementedError
        for batch in ("ragged", "far"):
            tensors = RECORDER.tensors(batch)
            estimates = core.kl_penalty(tensors["log_prob"], tensors["reference_log_prob"], name)
            weight = tensors["mask"].double() if batch == "ragged" else torch.ones_like(estimates)

            def total(log_prob: Tensor, name: str = name, tensors=tensors, weight=weight) -> Tensor:
                return (
                    core.kl_penalty(log_prob, tensors["reference_log_prob"], name) * weight
                ).sum()

            found = loss_and_gradient(total, tensors["log_prob"]) | {"estimates": estimates}
            RECORDER.case(
                f"kl/{name}/{batch}", f"{CORE}.kl_penalty", found, batch=batch, kl_penalty=name
            )
    controller = core.AdaptiveKLController(init_kl_coef=0.2, target_kl=0.5, horizon=100)
    tensors = {
        "response_mask": MASK,
        "token_level_scores": BATCH["outcome_by_token"],
        "old_log_probs": BATCH["behavior_log_prob"],
        "ref_log_prob": BATCH["reference_log_prob"],
    }
    data, metrics = apply_kl_penalty(DataProto.from_dict(tensors=tensors), controller, "kl")
    found = {
        "rewards": data.batch["token_level_rewards"],
        "kl": metrics["actor/reward_kl_penalty"],
        "next_coef": controller.value,
    }
    RECORDER.case(
        "kl_in_reward",
        "verl.trainer.ppo.ray_trainer.apply_kl_penalty",
        found,
        kl_coef=0.2,
        target_kl=0.5,
        horizon=100,
    )


def aggregations() -> None:
    losses, empty = BATCH["advantage"], MASK.clone()
    empty[2] = 0.0  # a response that was filtered
    for mode in MODES:

        def reduced(losses: Tensor, mode: str = mode) -> Tensor:
            return core.agg_loss(losses, empty, mode, loss_scale_factor=LENGTH)

        found = loss_and_gradient(reduced, losses)
        RECORDER.case(
            f"aggregation/{mode}",
            f"{CORE}.agg_loss",
            found,
            losses="advantage",
            masked_row=2,
            loss_scale_factor=LENGTH,
        )


def corrections() -> None:
    log_ratio = BATCH["proximal_log_prob"] - BATCH["behavior_log_prob"]
    for level in ("token", "sequence"):
        weights, _ = rollout_corr_helper.compute_rollout_correction_weights(
            log_ratio, MASK, level, 1.2
        )
        RECORDER.case(
            f"correction/truncate/{level}",
            f"{CORRECTION}.compute_rollout_correction_weights",
            {"weight": weights},
            rollout_is=level,
            rollout_is_threshold=1.2,
        )
    for level, low, high in (
        ("token_k1", 0.8, 1.25),
        ("seq_sum_k1", 0.5, 2.0),
        ("seq_mean_k1", 0.95, 1.08),
    ):
        kept, _ = rollout_corr_helper.compute_rollout_rejection_mask(
            log_ratio, MASK, level, f"{low}_{high}"
        )
        RECORDER.case(
            f"correction/mask/{level}",
            f"{CORRECTION}.compute_rollout_rejection_mask",
            {"kept": kept},
            rollout_rs=level,
            lower=low,
            upper=high,
        )
    proto, kept, _ = rollout_corr_helper.compute_rollout_correction_and_rejection_mask(
        BATCH["proximal_log_prob"],
        BATCH["behavior_log_prob"],
        MASK,
        rollout_is="token",
        rollout_is_threshold=1.2,
        rollout_rs="token_k1",
        rollout_rs_threshold="0.8_1.25",
    )
    weights = proto.batch["rollout_is_weights"]
    config = actor(clip_ratio_low=0.05, clip_ratio_high=0.08)
    for name, registered, advantage in (
        ("ppo", "vanilla", "advantage"),
        ("gspo", "gspo", "advantage_by_sequence"),
    ):

        def loss(
            log_prob: Tensor, registered: str = registered, advantage: str = advantage
        ) -> Tensor:
            function = core.get_policy_loss_fn(registered)
            return function(
                BATCH["proximal_log_prob"],
                log_prob,
                BATCH[advantage],
                kept,
                "token-mean",
                config,
                weights,
            )[0]

        RECORDER.case(
            f"correction/loss/{name}",
            f"{CORE}.{registered}",
            loss_and_gradient(loss, BATCH["log_prob"]),
            rollout_is="token",
            rollout_is_threshold=1.2,
            rollout_rs="token_k1",
            lower=0.8,
            upper=1.25,
            clip_ratio_low=0.05,
            clip_ratio_high=0.08,
            advantage=advantage,
        )


if __name__ == "__main__":
    for part in (advantages, policy_losses, divergences, aggregations, corrections):
        part()
    RECORDER.save()
