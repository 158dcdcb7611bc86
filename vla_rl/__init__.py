"""vla_rl: post-train robot policies and language agents by reinforcement learning.

It is an actor runtime that puts asyncio first.

    from vla_rl import TaskStart, TrainingConfig, train

The names below are imported on first use; `import vla_rl` itself imports neither torch nor a
simulator.
"""

from typing import TYPE_CHECKING

from vla_rl.util import import_hooks
from vla_rl.util.imports import lazy_names

if TYPE_CHECKING:
    from vla_rl.actors import Runtime as Runtime
    from vla_rl.env_workers import SimulatorConfig as SimulatorConfig
    from vla_rl.graph import (
        Node as Node,
        NodeOutput as NodeOutput,
        NodeRole as NodeRole,
        NodeType as NodeType,
        Pipeline as Pipeline,
    )
    from vla_rl.models.loading import load_policy as load_policy
    from vla_rl.pipelines.config import (
        EmbodiedConfig as EmbodiedConfig,
        LearningConfig as LearningConfig,
        MixedTrainingConfig as MixedTrainingConfig,
        RunConfig as RunConfig,
        TextTrainingConfig as TextTrainingConfig,
        TrainingConfig as TrainingConfig,
    )
    from vla_rl.rollout import (
        SchedulerConfig as SchedulerConfig,
        TaskStart as TaskStart,
        copy_arrays as copy_arrays,
        stop_reason as stop_reason,
    )
    from vla_rl.run.train import Outcome as Outcome, TrainingRun as TrainingRun, train as train
    from vla_rl.team.members import Member as Member, Team as Team
    from vla_rl.types import (
        Agent as Agent,
        Env as Env,
        EnvSpec as EnvSpec,
        EpisodeSpec as EpisodeSpec,
        Group as Group,
        Policy as Policy,
        Sampling as Sampling,
        Step as Step,
        Trajectory as Trajectory,
    )

__version__ = "0.1.0"


import_hooks.declare_torchvision_operators()
import_hooks.explain_missing_extras()
import_hooks.register_env_ids()

__getattr__, __dir__ = lazy_names(__name__)
