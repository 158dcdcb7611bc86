"""Advantages: how much better than expected, from rewards alone or with a critic.

NumPy, no gradient.

Every estimator takes a `RewardBatch` and returns `Advantages`; `advantage_estimator(config)` picks
one by name.
"""

from vla_rl.algorithms.advantages.baselines import (
    best_of_group_advantage,
    group_advantage,
    leave_one_out_advantage,
    max_likelihood_advantage,
)
from vla_rl.algorithms.advantages.config import (
    ADVANTAGE_PARAMETERS,
    ADVANTAGES,
    AdvantageConfig,
    advantage_estimator,
)
from vla_rl.algorithms.advantages.returns import whiten_values
from vla_rl.algorithms.advantages.reward_batch import (
    AdvantageEstimator,
    Advantages,
    RewardBatch,
    StepLevel,
    make_reward_batch,
    outcome_advantages,
)

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
    "make_reward_batch",
    "max_likelihood_advantage",
    "outcome_advantages",
    "whiten_values",
]
