"""Advantages: how much better than expected, from rewards alone or with a critic.

NumPy, no gradient.

Every estimator takes a `RewardBatch` and returns `Advantages`; `advantage_estimator(config)` picks
one by name.
"""

from vla_rl.algorithms.advantages.config import ADVANTAGE_PARAMETERS, AdvantageConfig
from vla_rl.algorithms.advantages.from_trajectories import StepLevel, reward_batch_of
from vla_rl.algorithms.advantages.group_baselines import (
    best_of_group_advantage,
    group_advantage,
    leave_one_out_advantage,
    max_likelihood_advantage,
)
from vla_rl.algorithms.advantages.registry import ADVANTAGES, advantage_estimator
from vla_rl.algorithms.advantages.reward_batch import (
    AdvantageEstimator,
    Advantages,
    RewardBatch,
    outcome_advantages,
)
from vla_rl.algorithms.advantages.whitening import whiten

__all__ = [
    "ADVANTAGES",
    "ADVANTAGE_PARAMETERS",
    "AdvantageConfig",
    "AdvantageEstimator",
    "Advantages",
    "RewardBatch",
    "StepLevel",
    "advantage_estimator",
    "best_of_group_advantage",
    "group_advantage",
    "leave_one_out_advantage",
    "max_likelihood_advantage",
    "outcome_advantages",
    "reward_batch_of",
    "whiten",
]
