"""The built-in pipelines, one file each: the graph of one update, and its default settings.

    grpo ──┬── dapo, gspo, cpgd             no critic: episodes of a group are compared with each other
           ├── ppo ─── embodied_ppo         a critic
           └── embodied_grpo ─ embodied_srpo

A pipeline is a function `(parts) -> Pipeline`; its module may define `SETTINGS`, nested defaults of
the configuration, and `READS`, the options out of `OPTIONAL` that it reads. Select your own pipeline
as `"module:function"`; its module may define both too.
"""

import importlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, TypeVar

import msgspec

from vla_rl.algorithms.choices import chosen, is_function_path, load_function
from vla_rl.graph import Pipeline, load_pipeline
from vla_rl.pipelines.config import LearningConfig
from vla_rl.pipelines.parts import Parts

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
            "embodied_srpo",
            "embodied_grpo",
            "embodied_ppo",
        )
    }
)
"""Built-in pipelines by name, each as "module:function"."""

OPTIONAL: Final = ("reward", "overlong", "critic", "embedding", "srpo", "run.videos_every")
"""Options that some pipelines read and others do not; a pipeline without `READS` reads all."""

NAMED_TABLES: Final = ("loss", "advantage")
"""Tables of the configuration whose other fields depend on their `name`."""


def make_pipeline(parts: Parts) -> Pipeline:
    """Build the pipeline that the parts' configuration names.

    Raises: ConfigError with the nearest match; GraphError.
    """
    return load_pipeline(_path(parts.config.pipeline), parts)


def settings_of(pipeline: str) -> Mapping[str, Any]:
    """Return the default settings of a pipeline, nested as in a file.

    Raises: ConfigError for an unknown name.
    """
    settings: Mapping[str, Any] = _declared(pipeline).get("SETTINGS", {})
    return settings


def unread_by_pipeline(pipeline: str) -> dict[str, str]:
    """Return the options that a pipeline does not read, each with the reason.

    Raises: ConfigError for an unknown name.
    """
    reads = _declared(pipeline).get("READS", OPTIONAL)
    return {
        option: f"it is for other pipelines than {pipeline!r}"
        for option in OPTIONAL
        if option not in reads
    }


def with_pipeline(config: ConfigT, pipeline: str) -> ConfigT:
    """Return `config` with another pipeline and that pipeline's default settings, except those that
    the task decides.

    Raises: ConfigError for an unknown name, or settings that contradict the rest of the
    configuration.
    """
    settled = merged(
        msgspec.to_builtins(config),
        settings_of(pipeline),
        config.task_settings(pipeline),
        {"pipeline": pipeline},
    )
    return msgspec.convert(settled, type(config))


def merged(*tables: Mapping[str, Any]) -> dict[str, Any]:
    """Merge nested tables; later ones override earlier ones.

    A loss or an advantage of another name replaces the whole earlier table, because the other
    fields belonged to the old name.
    """
    result: dict[str, Any] = {}
    for table in tables:
        for key, value in table.items():
            below = result.get(key)
            if isinstance(below, Mapping) and isinstance(value, Mapping):
                renamed = key in NAMED_TABLES and value.get("name", below.get("name")) != below.get(
                    "name"
                )
                result[key] = merged(value) if renamed else merged(below, value)
            else:
                result[key] = merged(value) if isinstance(value, Mapping) else value
    return result


def _declared(pipeline: str) -> Mapping[str, Any]:
    """Return the names that the module of a pipeline defines."""
    path = _path(pipeline)
    load_function(path, "pipeline")
    return vars(importlib.import_module(path.partition(":")[0]))


def _path(pipeline: str) -> str:
    return pipeline if is_function_path(pipeline) else chosen(PIPELINES, pipeline, "pipeline")
