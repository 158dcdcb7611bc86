"""The settings of a run for an engine that has only some of its host's environments."""

from msgspec.structs import replace

from vla_rl.cluster.run_layout import RunShape
from vla_rl.errors import ConfigError
from vla_rl.pipelines.config import (
    LearningConfig,
    MixedTrainingConfig,
    TextTrainingConfig,
    TrainingConfig,
)
from vla_rl.training.team import Team


def shape_of(config: LearningConfig, team: Team) -> RunShape:
    """Return what decides the layout of a run on several hosts."""
    kinds = {(member.engine or config.engine).kind for member in team.members.values()}
    return RunShape(
        num_envs=config.num_envs,
        num_ranks=config.learner.ranks,
        plays_here=config.cluster.plays_here,
        uses_gpus=config.run.device != "cpu" and kinds != {"remote"},
        spans_gpus=kinds != {"torch"},
        learners=config.cluster.learners,
        group_size=config.learner.tensor_parallel,
    )


def with_environments(config: LearningConfig, num_envs: int) -> LearningConfig:
    """Return the same settings with fewer environments.

    Raises: ConfigError for a run with simulators and conversations.
    """
    if isinstance(config, MixedTrainingConfig):
        raise ConfigError(
            f"a host with several GPUs would share {config.simulators.num_envs} simulators and "
            f"{config.text.num_envs} conversations among its engines, expected environments of one "
            'kind; list one GPU for each host (gpus = "0")'
        )
    if isinstance(config, TrainingConfig):
        return replace(config, simulators=replace(config.simulators, num_envs=num_envs))
    assert isinstance(config, TextTrainingConfig)
    return replace(config, text=replace(config.text, num_envs=num_envs))
