"""SRPO's reward: trajectories to vectors, successes to references, distances to rewards."""

from vla_rl.algorithms.srpo.encoders import (
    EmbeddingConfig,
    ObservationEncoder,
    TrajectoryEncoder,
    VJepa2Config,
    trajectory_embedding,
    trajectory_embeddings,
)
from vla_rl.algorithms.srpo.rewards import BankedTask, ReferenceBank, srpo_rewards
from vla_rl.algorithms.srpo.rules import SrpoConfig

__all__ = [
    "BankedTask",
    "EmbeddingConfig",
    "ObservationEncoder",
    "ReferenceBank",
    "SrpoConfig",
    "TrajectoryEncoder",
    "VJepa2Config",
    "srpo_rewards",
    "trajectory_embedding",
    "trajectory_embeddings",
]
