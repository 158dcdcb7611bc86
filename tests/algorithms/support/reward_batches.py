"""Batches of outcomes small enough to follow, and the advantages that an estimator gives them."""

import numpy as np

from vla_rl.algorithms import AdvantageConfig, Advantages, RewardBatch, advantage_estimator

OF_GROUPS = [
    "grpo",
    "dr_grpo",
    "max_rl",
    "rloo",
    "pass_at_k",
    "gpg",
    "cpgd_filter",
    "opo",
    "reinforce_plus_plus_baseline",
]


def estimate(name: str, batch: RewardBatch, **changes) -> Advantages:
    return advantage_estimator(AdvantageConfig(name=name, **changes))(batch)


def outcomes(rewards: list[float], group: list[int], **others) -> RewardBatch:
    fields = {
        "num_tokens": np.ones(len(rewards)),
        "greedy_rewards": np.zeros(len(rewards)),
    } | others
    return RewardBatch(
        rewards=np.array(rewards, dtype=np.float64), group=np.array(group, dtype=np.int64), **fields
    )


def column(made: Advantages) -> list[float]:
    assert made.advantage.dtype == np.float32
    assert made.advantage.shape[1] == 1
    return made.advantage[:, 0].tolist()
