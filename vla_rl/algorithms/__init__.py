"""Advantages, losses and rewards as pure functions, one topic a file, readable beside the papers."""

from vla_rl.algorithms.advantages import group_advantage, leave_one_out_advantage
from vla_rl.algorithms.aggregation import (
    AGGREGATIONS,
    Aggregation,
    Denominators,
    aggregation,
    count_denominators,
    seq_mean_token_mean,
    seq_mean_token_sum,
    token_mean,
)
from vla_rl.algorithms.entropy import entropy
from vla_rl.algorithms.filters import has_equal_rewards, within_accuracy
from vla_rl.algorithms.kl import KL_ESTIMATORS, k1, k2, k3
from vla_rl.algorithms.srpo import SrpoConfig, srpo_rewards
from vla_rl.algorithms.surrogate import RatioDiagnostics, clipped_surrogate
from vla_rl.algorithms.trajectory_embedding import EmbeddingConfig, trajectory_embedding, trajectory_embeddings

__all__ = [
    "AGGREGATIONS",
    "KL_ESTIMATORS",
    "Aggregation",
    "Denominators",
    "EmbeddingConfig",
    "RatioDiagnostics",
    "SrpoConfig",
    "aggregation",
    "clipped_surrogate",
    "count_denominators",
    "entropy",
    "group_advantage",
    "has_equal_rewards",
    "k1",
    "k2",
    "k3",
    "leave_one_out_advantage",
    "seq_mean_token_mean",
    "seq_mean_token_sum",
    "srpo_rewards",
    "token_mean",
    "trajectory_embedding",
    "trajectory_embeddings",
    "within_accuracy",
]
