"""Learning: learners, critics and the optimizer, which update weights, and checkpoints.

learner        `Learner`: policy gradients; imitation: `Imitator`, cross-entropy on demonstrations
plan           rows of each optimizer step and of each rank; sharded: a learner over several ranks
team           several policies that learn in one run, together or in turns
critic         `Critic`: values; scoring: `Reference`, the frozen policy of a KL term
columns        each number of a token, declared once; rows: decisions as rows of tokens; decisions:
               those rows as padded tensors
checkpoint     all state of a run, written completely or not at all

Importing the configurations does not import torch; the other names do when they are first used.
"""

from typing import TYPE_CHECKING

from vla_rl.lazy_names import lazy_names
from vla_rl.learning.config import CriticConfig, ImitationConfig, LearnerConfig, OptimizerConfig

if TYPE_CHECKING:
    from vla_rl.learning.checkpoint import (
        Checkpoint,
        PreparedCheckpoint,
        load_checkpoint,
        prepare_checkpoint,
        read_policy_tensors,
        save_checkpoint,
        verify_checkpoint,
    )
    from vla_rl.learning.checkpoint_folders import latest_checkpoint, list_checkpoints
    from vla_rl.learning.critic import Critic, PolicyCritic
    from vla_rl.learning.imitation import Demonstration, Imitator
    from vla_rl.learning.learner import Learner, PolicyLearner, PolicyMismatchError, UpdateReport
    from vla_rl.learning.optimizer import DivergedError
    from vla_rl.learning.scoring import PolicyReference, Reference
    from vla_rl.learning.team import CriticTeam, LearnerTeam, ReferenceTeam
    from vla_rl.learning.training import TeamState, TrainingState, WeightSink
    from vla_rl.learning.values import Judged

__all__ = [
    "Checkpoint",
    "Critic",
    "CriticConfig",
    "CriticTeam",
    "Demonstration",
    "DivergedError",
    "ImitationConfig",
    "Imitator",
    "Judged",
    "Learner",
    "LearnerConfig",
    "LearnerTeam",
    "OptimizerConfig",
    "PolicyCritic",
    "PolicyLearner",
    "PolicyMismatchError",
    "PolicyReference",
    "PreparedCheckpoint",
    "Reference",
    "ReferenceTeam",
    "TeamState",
    "TrainingState",
    "UpdateReport",
    "WeightSink",
    "latest_checkpoint",
    "list_checkpoints",
    "load_checkpoint",
    "prepare_checkpoint",
    "read_policy_tensors",
    "save_checkpoint",
    "verify_checkpoint",
]

_HOME = {
    "checkpoint": (
        "Checkpoint",
        "PreparedCheckpoint",
        "load_checkpoint",
        "prepare_checkpoint",
        "read_policy_tensors",
        "save_checkpoint",
        "verify_checkpoint",
    ),
    "checkpoint_folders": (
        "latest_checkpoint",
        "list_checkpoints",
    ),
    "critic": (
        "Critic",
        "PolicyCritic",
    ),
    "imitation": (
        "Demonstration",
        "Imitator",
    ),
    "learner": (
        "Learner",
        "PolicyLearner",
        "PolicyMismatchError",
        "UpdateReport",
    ),
    "optimizer": ("DivergedError",),
    "scoring": (
        "PolicyReference",
        "Reference",
    ),
    "team": (
        "CriticTeam",
        "LearnerTeam",
        "ReferenceTeam",
    ),
    "training": (
        "TeamState",
        "TrainingState",
        "WeightSink",
    ),
    "values": ("Judged",),
}
__getattr__, __dir__ = lazy_names(__name__, _HOME)
