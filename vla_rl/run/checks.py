"""Check the arguments of `train`, and that its pipeline reads the settings that were chosen."""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from vla_rl.errors import ConfigError
from vla_rl.graph import Pipeline, TaskGraph
from vla_rl.learner import CriticConfig
from vla_rl.pipelines.config import LearningConfig, RunConfig
from vla_rl.reporting.run_directory import require_plain
from vla_rl.rollout import TaskStart


def check_arguments(config: Any, starts: Any, agent: Any) -> None:
    """Raise ConfigError if the configuration, the starts or the agent have the wrong type, or the
    configuration holds what its file cannot.
    """
    if not isinstance(config, LearningConfig):
        raise ConfigError(
            f"config is of type {type(config).__name__}, expected a TrainingConfig or another "
            "LearningConfig; the arguments of `train` are config, starts and model, in this order"
        )
    require_plain(config, "config")
    if isinstance(starts, TaskStart) or not isinstance(starts, Sequence):
        raise ConfigError(
            f"starts is of type {type(starts).__name__}, expected a list of TaskStarts, such as "
            "[TaskStart(...)]"
        )
    if not starts:
        raise ConfigError("starts is empty, expected at least one TaskStart to begin episodes from")
    for number, start in enumerate(starts):
        if not isinstance(start, TaskStart):
            raise ConfigError(
                f"starts[{number}] is of type {type(start).__name__}, expected a TaskStart"
            )
    if agent is not None and not callable(agent):
        raise ConfigError(
            f"agent is of type {type(agent).__name__}, expected a function `async def agent(env, "
            "policy)`; pass the function itself and do not call it"
        )


def customised(pipeline: Pipeline, customise: Callable[[Pipeline], Any]) -> Pipeline:
    """Return the pipeline that `customise` returns.

    Raises: ConfigError if it returns something else.
    """
    changed = customise(pipeline)
    if not isinstance(changed, Pipeline):
        hint = "; is a `return` missing?" if changed is None else ""
        what = "None" if changed is None else f"a {type(changed).__name__}"
        raise ConfigError(f"customise returned {what}, expected the pipeline{hint}")
    return changed


def check_settings(
    config: LearningConfig, graph: TaskGraph, *, has_critic: bool, makes_videos: bool
) -> None:
    """Raise ConfigError for a setting that nothing in the run would read.

    Args:
        config: the run's configuration.
        graph: the pipeline's graph.
        has_critic: whether the pipeline has a critic.
        makes_videos: whether a node offers episodes to the recorder of videos.
    """
    if config.overlong.max_length is not None and "overlong" not in graph.nodes:
        raise ConfigError(
            f"overlong.max_length is {config.overlong.max_length}, but pipeline "
            f"{config.pipeline!r} has no node 'overlong' to penalise long replies; use dapo, or "
            "insert that node"
        )
    every = config.run.videos_every
    if not makes_videos and every not in (
        RunConfig().videos_every,
        _default(config, "run").videos_every,
    ):
        raise ConfigError(
            f"run.videos_every is {every}, but pipeline {config.pipeline!r} makes no videos; leave "
            "it unset, or use embodied_srpo, embodied_grpo or embodied_ppo"
        )
    changed = [] if has_critic else _changed_critic(config)
    if changed:
        raise ConfigError(
            f"critic.{changed[0]} is {getattr(config.critic, changed[0])!r}, but pipeline "
            f"{config.pipeline!r} has no critic; leave the critic's settings unset, or use ppo or "
            "embodied_ppo"
        )


def _changed_critic(config: LearningConfig) -> list[str]:
    """Return the critic's settings that differ from the defaults and from the recipe's own."""
    presets = (CriticConfig(), _default(config, "critic"))
    return [
        name
        for name in config.critic.__struct_fields__
        if all(getattr(config.critic, name) != getattr(preset, name) for preset in presets)
    ]


def _default(config: LearningConfig, name: str) -> Any:
    """Return the default of a field of a recipe's configuration."""
    # a recipe sets such fields for all its pipelines; only what its user chose is refused
    return next(each.default for each in msgspec.structs.fields(config) if each.name == name)
