"""Engines and learners: who computes actions, who updates the weights, and the one lane both share the device on.

policy_model   what they need of a policy family; language_model, of one that speaks
device_lane    the thread that owns the device
torch_engine   `TorchEngine`: actions, or replies, in batches of whoever waits
learner        `Learner`: policy gradients; imitation: `Imitator`, cross-entropy on demonstrations
team           several policies that learn in one run, jointly or by turns
critic         `Critic`: values, for whoever learns with one; scoring: `Reference`, the frozen anchor of a KL term
checkpoint     everything that a run goes on from, whole or not at all

Configs import in an instant; the rest brings torch, when it is first asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from vla_rl.engines.config import CriticConfig, EngineConfig, ImitationConfig, LearnerConfig, OptimizerConfig

if TYPE_CHECKING:
    from vla_rl.engines.checkpoint import (
        Checkpoint,
        PreparedCheckpoint,
        load_checkpoint,
        prepare_checkpoint,
        save_checkpoint,
        verify_checkpoint,
    )
    from vla_rl.engines.checkpoint_folders import latest_checkpoint, list_checkpoints
    from vla_rl.engines.critic import Critic, Judged
    from vla_rl.engines.device_lane import DeviceLane
    from vla_rl.engines.imitation import Demonstration, Imitator
    from vla_rl.engines.language_model import LanguageModel
    from vla_rl.engines.learner import Learner, PolicyMismatchError, UpdateReport
    from vla_rl.engines.optimizer import DivergedError
    from vla_rl.engines.policy_model import PolicyModel, TokenModel
    from vla_rl.engines.scoring import Reference
    from vla_rl.engines.team import CriticTeam, LearnerTeam, ReferenceTeam
    from vla_rl.engines.torch_engine import TorchEngine
    from vla_rl.engines.training import TeamState, TrainingState, WeightSink

__all__ = [
    "Checkpoint",
    "Critic",
    "CriticConfig",
    "CriticTeam",
    "Demonstration",
    "DeviceLane",
    "DivergedError",
    "EngineConfig",
    "ImitationConfig",
    "Imitator",
    "Judged",
    "LanguageModel",
    "Learner",
    "LearnerConfig",
    "LearnerTeam",
    "OptimizerConfig",
    "PolicyMismatchError",
    "PolicyModel",
    "PreparedCheckpoint",
    "Reference",
    "ReferenceTeam",
    "TeamState",
    "TokenModel",
    "TorchEngine",
    "TrainingState",
    "UpdateReport",
    "WeightSink",
    "latest_checkpoint",
    "list_checkpoints",
    "load_checkpoint",
    "prepare_checkpoint",
    "save_checkpoint",
    "verify_checkpoint",
]

_HOME = {
    "checkpoint": (
        "Checkpoint",
        "PreparedCheckpoint",
        "load_checkpoint",
        "prepare_checkpoint",
        "save_checkpoint",
        "verify_checkpoint",
    ),
    "checkpoint_folders": ("latest_checkpoint", "list_checkpoints"),
    "critic": ("Critic", "Judged"),
    "device_lane": ("DeviceLane",),
    "imitation": ("Demonstration", "Imitator"),
    "language_model": ("LanguageModel",),
    "learner": ("Learner", "PolicyMismatchError", "UpdateReport"),
    "optimizer": ("DivergedError",),
    "policy_model": ("PolicyModel", "TokenModel"),
    "scoring": ("Reference",),
    "team": ("CriticTeam", "LearnerTeam", "ReferenceTeam"),
    "torch_engine": ("TorchEngine",),
    "training": ("TeamState", "TrainingState", "WeightSink"),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
