"""The settings of a run for an engine that has only some of its host's environments."""

from typing import Final

from msgspec.structs import replace

from vla_rl.cluster.run_layout import RunShape
from vla_rl.envs.text import is_text_task
from vla_rl.pipelines.config import (
    LearningConfig,
    MixedTrainingConfig,
    TextTrainingConfig,
    TrainingConfig,
)
from vla_rl.remote_rollout.messages import EnvironmentShare
from vla_rl.team.members import Team
from vla_rl.types import EpisodeSpec

SIMULATORS: Final = "simulators"
CONVERSATIONS: Final = "text"
"""Kinds of environments, by the name of the settings that have their number."""


def shape_of(config: LearningConfig, team: Team) -> RunShape:
    """Return what decides the layout of a run on several hosts."""
    engines = {(member.engine or config.engine).kind for member in team.members.values()}
    return RunShape(
        num_envs=config.num_envs,
        kinds=kinds_of_environments(config),
        num_ranks=config.learner.ranks,
        plays_here=config.cluster.plays_here,
        uses_gpus=config.run.device != "cpu" and engines != {"remote"},
        spans_gpus=engines != {"torch"},
        learners=config.cluster.learners,
        group_size=config.learner.tensor_parallel,
    )


def kinds_of_environments(config: LearningConfig) -> dict[str, int]:
    """Return the number of environments of each kind; empty if all are of one kind."""
    if not isinstance(config, MixedTrainingConfig):
        return {}
    return {SIMULATORS: config.simulators.num_envs, CONVERSATIONS: config.text.num_envs}


def kind_of_environment(episode: EpisodeSpec) -> str:
    """Return the kind of environment in which an episode of a run of several kinds runs."""
    return CONVERSATIONS if is_text_task(episode.env) else SIMULATORS


def with_environments(config: LearningConfig, share: EnvironmentShare) -> LearningConfig:
    """Return the same settings with fewer environments."""
    if isinstance(config, MixedTrainingConfig):
        return replace(
            config,
            simulators=replace(config.simulators, num_envs=share.kinds[SIMULATORS]),
            text=replace(config.text, num_envs=share.kinds[CONVERSATIONS]),
        )
    if isinstance(config, TrainingConfig):
        return replace(config, simulators=replace(config.simulators, num_envs=share.num_envs))
    assert isinstance(config, TextTrainingConfig)
    return replace(config, text=replace(config.text, num_envs=share.num_envs))
