"""The pipelines by name, with the settings that each reads.

A pipeline is a function `(parts) -> Pipeline`; its module may define `SETTINGS`, nested defaults of
the configuration, and `READS`, the options out of `OPTIONAL` that it reads. Select your own pipeline
as `"module:function"`; its module may define both too.
"""

import importlib
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any, Final, TypeVar

import msgspec

from vla_rl.algorithms.losses.config import PolicyLossSettings
from vla_rl.errors import ConfigError
from vla_rl.graph import Pipeline, TaskGraph, load_pipeline
from vla_rl.learner import CriticConfig
from vla_rl.pipelines.config import EmbodiedConfig, LearningConfig, RunConfig
from vla_rl.pipelines.nodes.advantages import GroupAdvantage
from vla_rl.pipelines.parts import Parts
from vla_rl.util.imports import choose, is_function_path, load_function

ConfigT = TypeVar("ConfigT", bound=LearningConfig)

PIPELINES: Final = MappingProxyType(
    {
        name: f"vla_rl.pipelines.{name}:{name}"
        for name in (
            "grpo",
            "ppo",
            "dapo",
            "gspo",
            "cpgd",
            "nft",
            "embodied_srpo",
            "embodied_grpo",
            "embodied_ppo",
            "off_policy",
        )
    }
)
"""Built-in pipelines by name, each as "module:function"."""

OPTIONAL: Final = ("reward", "overlong", "critic", "embedding", "srpo", "run.videos_every")
"""Options that some pipelines read and others do not; a pipeline without `READS` reads all."""

OF_BUFFERS: Final = ("off_policy", "replay")
"""Options of pipelines that learn from a replay buffer; a pipeline reads them if `READS` names them."""

OF_GRADIENTS: Final = ("learner", "advantage", "kl_in_reward")
"""Options of pipelines that learn by policy gradient, which the others do not read."""

NAMED_TABLES: Final[Mapping[str, Collection[str]]] = MappingProxyType(
    {"loss": PolicyLossSettings.__struct_fields__, "advantage": ("name",)}
)
"""Tables of the configuration whose other fields depend on their `name`, and the fields that do not."""


def make_pipeline(parts: Parts) -> Pipeline:
    """Build the pipeline that the parts' configuration names.

    Raises: ConfigError with the nearest match; GraphError.
    """
    return load_pipeline(_function_path(parts.config.pipeline), parts)


def pipeline_settings(pipeline: str) -> Mapping[str, Any]:
    """Return the default settings of a pipeline, nested as in a file.

    Raises: ConfigError for an unknown name.
    """
    settings: Mapping[str, Any] = _module_names(pipeline).get("SETTINGS", {})
    return settings


def unused_by_pipeline(pipeline: str) -> dict[str, str]:
    """Return the options that a pipeline does not read, each with the reason.

    Raises: ConfigError for an unknown name.
    """
    reads = _module_names(pipeline).get("READS", OPTIONAL)
    others = OF_GRADIENTS if learns_from_buffer(pipeline) else OF_BUFFERS
    return {
        option: f"it is for other pipelines than {pipeline!r}"
        for option in (*OPTIONAL, *others)
        if option not in reads
    }


def learns_from_buffer(pipeline: str) -> bool:
    """Return whether a pipeline trains a head from a replay buffer: its `READS` names `off_policy`.

    Raises: ConfigError for an unknown name.
    """
    return "off_policy" in _module_names(pipeline).get("READS", ())


def learns_offline(config: LearningConfig) -> bool:
    """Return whether a run learns from stored episodes alone."""
    return (
        learns_from_buffer(config.pipeline)
        and isinstance(config, EmbodiedConfig)
        and config.replay.source is not None
    )


def with_pipeline(config: ConfigT, pipeline: str) -> ConfigT:
    """Return `config` with another pipeline and that pipeline's default settings, except those that
    the task decides.

    Raises: ConfigError for an unknown name, or settings that contradict the rest of the
    configuration.
    """
    settled = merge_tables(
        msgspec.to_builtins(config),
        pipeline_settings(pipeline),
        config.task_settings(pipeline),
        {"pipeline": pipeline},
    )
    return msgspec.convert(settled, type(config))


def merge_tables(*tables: Mapping[str, Any]) -> dict[str, Any]:
    """Merge nested tables; later ones override earlier ones.

    A loss or an advantage of another name replaces the earlier one's parameters, because they belonged to
    the old name; what every loss has, such as its KL penalty, stays.
    """
    result: dict[str, Any] = {}
    for table in tables:
        for key, value in table.items():
            below = result.get(key)
            if isinstance(below, Mapping) and isinstance(value, Mapping):
                renamed = key in NAMED_TABLES and value.get("name", below.get("name")) != below.get(
                    "name"
                )
                kept = NAMED_TABLES[key] if renamed else below
                common = {field: below[field] for field in kept if field in below}
                result[key] = merge_tables(common, value)
            else:
                result[key] = merge_tables(value) if isinstance(value, Mapping) else value
    return result


def _module_names(pipeline: str) -> Mapping[str, Any]:
    """Return the names that the module of a pipeline defines."""
    path = _function_path(pipeline)
    load_function(path, "pipeline")
    return vars(importlib.import_module(path.partition(":")[0]))


def _function_path(pipeline: str) -> str:
    return pipeline if is_function_path(pipeline) else choose(PIPELINES, pipeline, "pipeline")


def customise_pipeline(pipeline: Pipeline, customise: Callable[[Pipeline], Any]) -> Pipeline:
    """Return the pipeline that `customise` returns.

    Raises: ConfigError if it returns something else.
    """
    if not callable(customise):
        raise ConfigError(
            f"customise is {customise!r}, expected a function that takes the pipeline and returns it"
        )
    changed = customise(pipeline)
    if not isinstance(changed, Pipeline):
        hint = "; is a `return` missing?" if changed is None else ""
        what = "None" if changed is None else f"a {type(changed).__name__}"
        raise ConfigError(f"customise returned {what}, expected the pipeline{hint}")
    return changed


def refuse_unused_settings(
    config: LearningConfig, graph: TaskGraph, *, has_critic: bool, makes_videos: bool
) -> None:
    """Raise ConfigError for a setting that nothing in the run would read, or an advantage that lacks a critic.

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
        _default_value(config, "run").videos_every,
    ):
        raise ConfigError(
            f"run.videos_every is {every}, but pipeline {config.pipeline!r} makes no videos; leave "
            "it unset, or use nft, embodied_srpo, embodied_grpo or embodied_ppo"
        )
    # noticed only after the first episodes otherwise; another node than this may have values of its own
    compares_groups = any(isinstance(node.func, GroupAdvantage) for node in graph.nodes.values())
    if compares_groups and config.advantage.needs_values:
        raise ConfigError(
            f"advantage.name is {config.advantage.name!r}, which uses a critic's values, but pipeline "
            f"{config.pipeline!r} has no critic; use ppo or embodied_ppo, or another advantage, such as rloo"
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
    presets = (CriticConfig(), _default_value(config, "critic"))
    return [
        name
        for name in config.critic.__struct_fields__
        if all(getattr(config.critic, name) != getattr(preset, name) for preset in presets)
    ]


def _default_value(config: LearningConfig, name: str) -> Any:
    """Return the default of a field of a recipe's configuration."""
    # a recipe sets such fields for all its pipelines; only what its user chose is refused
    return next(each.default for each in msgspec.structs.fields(config) if each.name == name)
