"""Run RLinf's functions: GAE and group advantages, (decoupled) PPO at three levels, the critic, KL,
aggregation.
"""

from typing import Any

import torch
from recording import Recorder, loss_and_gradient
from rlinf.algorithms import advantages, losses, utils
from rlinf.utils.utils import get_loss_agg_func, masked_mean_ratio
from torch import Tensor

RECORDER = Recorder(
    "rlinf", "RLinf/RLinf", "a3816b596478dcd8a5c69a6ec1468c9519f77b5b", ("omegaconf",)
)
BATCH, CHUNKS = RECORDER.tensors(dtype=torch.float32), RECORDER.tensors("chunks", torch.float32)
MASK = BATCH["mask"]
CUT_OFF = 5
"""The row of full length whose world would have gone on."""

FINAL_VALUE = 0.7


def estimates() -> None:
    rows, tokens = MASK.shape
    done = torch.zeros(tokens + 1, rows, dtype=torch.bool)
    for row, length in enumerate(MASK.sum(1).tolist()):
        done[length:, row] = row != CUT_OFF
    values = torch.cat([BATCH["old_values"].T, torch.full((1, rows), FINAL_VALUE)])
    for normalise in (False, True):
        advantage, returns = advantages.compute_gae_advantages_and_returns(
            rewards=BATCH["reward_by_token"].T,
            values=values,
            dones=done,
            gamma=0.9,
            gae_lambda=0.8,
            normalize_advantages=normalise,
            loss_mask=MASK.T,
        )
        RECORDER.case(
            f"gae/normalised={normalise}",
            "rlinf.algorithms.advantages.compute_gae_advantages_and_returns",
            {"advantage": advantage.T, "returns": returns.T},
            gamma=0.9,
            gae_lambda=0.8,
            normalize_advantages=normalise,
            cut_off_row=CUT_OFF,
            final_value=FINAL_VALUE,
        )
    advantage, _ = advantages.compute_grpo_advantages(
        BATCH["rewards"][:6], MASK[:6].T.float(), group_size=2
    )
    RECORDER.case(
        "grpo",
        "rlinf.algorithms.advantages.compute_grpo_advantages",
        {"advantage": advantage.T},
        rows=6,
        group_size=2,
    )
    # with shorter ones it looks for their ends along the wrong axis
    whole = torch.ones(tokens, 6, dtype=torch.bool)
    rewards = BATCH["rewards"][None, :6].clone()
    advantage, _ = advantages.compute_reinpp_advantages(rewards, whole, group_size=2)
    RECORDER.case(
        "reinpp",
        "rlinf.algorithms.advantages.compute_reinpp_advantages",
        {"advantage": advantage.T},
        rows=6,
        mask="none",
    )


def actor_losses() -> None:
    clips = {"clip_ratio_low": 0.1, "clip_ratio_high": 0.15, "clip_ratio_c": 1.2}
    for level in ("token_level", "action_level", "chunk_level"):
        whole = level == "chunk_level"
        advantage = CHUNKS["advantage_by_chunk"] if whole else CHUNKS["advantage_by_step"]
        executed = CHUNKS["step_mask"]
        # a chunk that was cut short keeps the log-probs of all its steps here: weigh whole chunks
        # only
        mask = executed.all(1) if whole else executed

        def inputs(
            log_prob: Tensor, level: str = level, advantage: Tensor = advantage, mask: Tensor = mask
        ) -> Any:
            rows = len(log_prob)
            return utils.preprocess_loss_inputs(
                logprobs=log_prob.reshape(rows, -1),
                old_logprobs=CHUNKS["behavior_log_prob"].reshape(rows, -1),
                proximal_logprobs=CHUNKS["proximal_log_prob"].reshape(rows, -1),
                advantages=advantage,
                loss_mask=mask,
                logprob_type=level,
                single_action_dim=2,
            )

        def ppo(log_prob: Tensor, inputs=inputs) -> Tensor:
            return losses.compute_ppo_actor_loss(**inputs(log_prob), **clips)[0]

        def decoupled(log_prob: Tensor, inputs=inputs) -> Tensor:
            return losses.compute_decoupled_ppo_actor_loss(
                **inputs(log_prob), **clips, behave_weight_threshold=1.15
            )[0]

        for name, loss, options in (
            ("ppo", ppo, {}),
            ("decoupled", decoupled, {"behave_weight_threshold": 1.15}),
        ):
            RECORDER.case(
                f"{name}/{level}",
                f"rlinf.algorithms.losses.compute_{'decoupled_' * bool(options)}ppo_actor_loss",
                loss_and_gradient(loss, CHUNKS["log_prob"]),
                batch="chunks",
                logprob_type=level,
                **clips,
                **options,
            )


def others() -> None:
    def critic(values: Tensor) -> Tensor:
        return losses.compute_ppo_critic_loss(
            values,
            BATCH["returns"],
            BATCH["old_values"],
            value_clip=0.3,
            huber_delta=0.5,
            loss_mask=MASK,
        )[0]

    RECORDER.case(
        "value",
        "rlinf.algorithms.losses.compute_ppo_critic_loss",
        loss_and_gradient(critic, BATCH["values"]),
        value_clip=0.3,
        huber_delta=0.5,
    )
    for name in ("k1", "abs", "k2", "k3"):

        def total(log_prob: Tensor, name: str = name) -> Tensor:
            return (utils.kl_penalty(log_prob, BATCH["reference_log_prob"], name) * MASK).sum()

        RECORDER.case(
            f"kl/{name}",
            "rlinf.algorithms.utils.kl_penalty",
            loss_and_gradient(total, BATCH["log_prob"]),
            kind=name,
        )
    for name in ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean"):
        reduce = get_loss_agg_func(name)
        found = loss_and_gradient(
            lambda each, reduce=reduce: reduce(each, MASK), BATCH["advantage"]
        )
        RECORDER.case(
            f"aggregation/{name}",
            "rlinf.utils.utils.get_loss_agg_func",
            found,
            losses="advantage",
            kind=name,
        )
    ratio = MASK.sum(1, keepdim=True) / MASK.shape[1]
    found = loss_and_gradient(lambda each: masked_mean_ratio(each, MASK, ratio), BATCH["advantage"])
    RECORDER.case(
        "aggregation/ratio",
        "rlinf.utils.utils.masked_mean_ratio",
        found,
        losses="advantage",
        max_steps=9,
    )


if __name__ == "__main__":
    for part in (estimates, actor_losses, others):
        part()
    RECORDER.save()
