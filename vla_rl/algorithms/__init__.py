"""Advantages, losses and rewards as pure functions, one topic per file.

They are to be read beside the papers.

advantages     how much better than expected: GRPO and its kin, GAE             NumPy
losses         policy losses, the value loss, trainer against engine             torch
aggregations   one loss a token ─► one number, the same for every split          torch
off_policy     targets and losses of learners from stored transitions           torch
filters        which groups and tokens are worth an update                       NumPy
srpo           rewards for failures, by how close they came to a success                 NumPy

Importing all of this does not import torch; a function that needs it does when it is first called.
"""

from vla_rl.algorithms.advantages import (
    AdvantageConfig,
    AdvantageEstimator,
    Advantages,
    RewardBatch,
    advantage_estimator,
    group_advantage,
    leave_one_out_advantage,
    make_reward_batch,
)
from vla_rl.algorithms.aggregations import (
    AGGREGATIONS,
    Aggregation,
    Denominators,
    aggregation,
    count_denominators,
    seq_mean_token_mean,
    seq_mean_token_sum,
    seq_mean_token_sum_norm,
    token_mean,
)
from vla_rl.algorithms.filters import (
    OverlongConfig,
    has_equal_rewards,
    overlong_filter,
    overlong_penalty,
    require_satisfiable,
    within_accuracy,
)
from vla_rl.algorithms.kl import (
    KL_ESTIMATORS,
    KlRewardConfig,
    importance_weighted_k3,
    k1,
    k2,
    k3,
    k3_plus,
    mean_kl,
    next_kl_coef,
    penalised_rewards,
)
from vla_rl.algorithms.losses import (
    CorrectionConfig,
    Diagnostics,
    KlLossConfig,
    PolicyLoss,
    PolicyLossConfig,
    TokenBatch,
    ValueLossConfig,
    engine_correction,
    policy_loss,
    safe_policy_loss,
    value_loss,
)
from vla_rl.algorithms.srpo import (
    BankedTask,
    EmbeddingConfig,
    ObservationEncoder,
    ReferenceBank,
    SrpoConfig,
    TrajectoryEncoder,
    VJepa2Config,
    srpo_rewards,
    trajectory_embedding,
    trajectory_embeddings,
)
from vla_rl.algorithms.tensors import entropy

__all__ = [
    "AGGREGATIONS",
    "KL_ESTIMATORS",
    "AdvantageConfig",
    "AdvantageEstimator",
    "Advantages",
    "Aggregation",
    "BankedTask",
    "CorrectionConfig",
    "Denominators",
    "Diagnostics",
    "EmbeddingConfig",
    "KlLossConfig",
    "KlRewardConfig",
    "ObservationEncoder",
    "OverlongConfig",
    "PolicyLoss",
    "PolicyLossConfig",
    "ReferenceBank",
    "RewardBatch",
    "SrpoConfig",
    "TokenBatch",
    "TrajectoryEncoder",
    "VJepa2Config",
    "ValueLossConfig",
    "advantage_estimator",
    "aggregation",
    "count_denominators",
    "engine_correction",
    "entropy",
    "group_advantage",
    "has_equal_rewards",
    "importance_weighted_k3",
    "k1",
    "k2",
    "k3",
    "k3_plus",
    "leave_one_out_advantage",
    "make_reward_batch",
    "mean_kl",
    "next_kl_coef",
    "overlong_filter",
    "overlong_penalty",
    "penalised_rewards",
    "policy_loss",
    "require_satisfiable",
    "safe_policy_loss",
    "seq_mean_token_mean",
    "seq_mean_token_sum",
    "seq_mean_token_sum_norm",
    "srpo_rewards",
    "token_mean",
    "trajectory_embedding",
    "trajectory_embeddings",
    "value_loss",
    "within_accuracy",
]
