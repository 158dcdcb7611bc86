"""vla_rl: post-train robot policies and language agents by reinforcement learning.

It is an actor runtime that puts asyncio first.

    from vla_rl import TaskStart, TrainingConfig, train

The names below are imported on first use; `import vla_rl` itself imports neither torch nor a
simulator.
"""

from typing import TYPE_CHECKING

from vla_rl import env_ids, lazy_scipy, renamed, torchvision_operators
from vla_rl.lazy_names import lazy_names
from vla_rl.util import extras

if TYPE_CHECKING:
    from vla_rl.actors import Runtime
    from vla_rl.graph import Node, NodeOutput, NodeRole, NodeType, Pipeline
    from vla_rl.models.loading import load_policy
    from vla_rl.pipelines.config import (
        EmbodiedConfig,
        LearningConfig,
        MixedTrainingConfig,
        RunConfig,
        TextTrainingConfig,
        TrainingConfig,
    )
    from vla_rl.rollout import SchedulerConfig, TaskStart, owned_copy, stop_reason
    from vla_rl.simulation import SimulatorConfig
    from vla_rl.training.run import Outcome, TrainingRun, train
    from vla_rl.training.team import Member, Team
    from vla_rl.types import (
        Agent,
        Env,
        EnvSpec,
        EpisodeSpec,
        Group,
        Policy,
        Sampling,
        Step,
        Trajectory,
    )

__version__ = "0.1.0"

__all__ = [
    "Agent",
    "EmbodiedConfig",
    "Env",
    "EnvSpec",
    "EpisodeSpec",
    "Group",
    "LearningConfig",
    "Member",
    "MixedTrainingConfig",
    "Node",
    "NodeOutput",
    "NodeRole",
    "NodeType",
    "Outcome",
    "Pipeline",
    "Policy",
    "RunConfig",
    "Runtime",
    "Sampling",
    "SchedulerConfig",
    "SimulatorConfig",
    "Step",
    "TaskStart",
    "Team",
    "TextTrainingConfig",
    "TrainingConfig",
    "TrainingRun",
    "Trajectory",
    "load_policy",
    "owned_copy",
    "stop_reason",
    "train",
]

_HOME = {
    "actors": ("Runtime",),
    "graph": ("Node", "NodeOutput", "NodeRole", "NodeType", "Pipeline"),
    "models.loading": ("load_policy",),
    "pipelines.config": (
        "EmbodiedConfig",
        "LearningConfig",
        "MixedTrainingConfig",
        "RunConfig",
        "TextTrainingConfig",
        "TrainingConfig",
    ),
    "rollout": ("SchedulerConfig", "TaskStart", "owned_copy", "stop_reason"),
    "simulation": ("SimulatorConfig",),
    "training.run": ("Outcome", "TrainingRun", "train"),
    "training.team": ("Member", "Team"),
    "types": (
        "Agent",
        "Env",
        "EnvSpec",
        "EpisodeSpec",
        "Group",
        "Policy",
        "Sampling",
        "Step",
        "Trajectory",
    ),
}

__all__ = ["__version__", *sorted(name for names in _HOME.values() for name in names)]

torchvision_operators.install()
lazy_scipy.install()
renamed.install()
extras.install()
env_ids.install()

__getattr__, __dir__ = lazy_names(__name__, _HOME)
