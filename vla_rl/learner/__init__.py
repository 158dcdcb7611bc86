"""Learner: it updates weights from trajectories, values and demonstrations.

learner        `Learner`: policy gradients; `backend`: passes, and the weights of this process
critic         `Critic`: values; `critic_backend`
imitation      `Imitator`: cross-entropy on demonstrations (SFT); `imitation_backend`
recap_values   values of stored control steps, for RECAP
team           several policies that learn in one run, together or in turns
rows           decisions as rows of tokens; decisions: those rows as padded tensors
plan           rows of each optimizer step and of each rank
ranks          who computes the passes: a process alone is one rank without a group
scoring        log-probs besides those of the update; `Reference`, the frozen policy of a KL term
finiteness     NaN and infinity, refused where they enter
optimizer      AdamW with masters, clipping and skipped steps
checkpoint     all state of a run, written completely or not at all
distributed    a learner over several processes
estimates      memory and seconds of an update, before it runs

Importing the configurations does not import torch; the other names do when they are first used.
"""

from typing import TYPE_CHECKING

from vla_rl.learner.config import (
    CriticConfig as CriticConfig,
    ImitationConfig as ImitationConfig,
    LearnerConfig as LearnerConfig,
    OptimizerConfig as OptimizerConfig,
)
from vla_rl.util.imports import lazy_names

if TYPE_CHECKING:
    from vla_rl.learner.backend import WeightSink as WeightSink
    from vla_rl.learner.checkpoint.files import (
        Checkpoint as Checkpoint,
        PreparedCheckpoint as PreparedCheckpoint,
        load_checkpoint as load_checkpoint,
        prepare_checkpoint as prepare_checkpoint,
        read_policy_tensors as read_policy_tensors,
        save_checkpoint as save_checkpoint,
        verify_checkpoint as verify_checkpoint,
    )
    from vla_rl.learner.checkpoint.folders import (
        latest_checkpoint as latest_checkpoint,
        list_checkpoints as list_checkpoints,
    )
    from vla_rl.learner.checkpoint.state import (
        TeamState as TeamState,
        TrainingState as TrainingState,
    )
    from vla_rl.learner.critic import Critic as Critic, PolicyCritic as PolicyCritic
    from vla_rl.learner.finiteness import TrajectoryValues as TrajectoryValues
    from vla_rl.learner.imitation import Demonstration as Demonstration, Imitator as Imitator
    from vla_rl.learner.learner import (
        Learner as Learner,
        PolicyLearner as PolicyLearner,
        PolicyMismatchError as PolicyMismatchError,
        UpdateReport as UpdateReport,
    )
    from vla_rl.learner.optimizer import DivergedError as DivergedError
    from vla_rl.learner.scoring import PolicyReference as PolicyReference, Reference as Reference
    from vla_rl.learner.team import (
        CriticTeam as CriticTeam,
        LearnerTeam as LearnerTeam,
        ReferenceTeam as ReferenceTeam,
    )


__getattr__, __dir__ = lazy_names(__name__)
