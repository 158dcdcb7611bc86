"""Check the arguments of `train` before anything starts."""

from collections.abc import Callable, Sequence
from typing import Any

from vla_rl.errors import ConfigError
from vla_rl.graph import Pipeline
from vla_rl.pipelines.config import LearningConfig
from vla_rl.rollout import TaskStart


def check_arguments(config: Any, starts: Any, agent: Any) -> None:
    """Raise ConfigError if the configuration, the starts or the agent have the wrong type."""
    if not isinstance(config, LearningConfig):
        raise ConfigError(
            f"config is of type {type(config).__name__}, expected a TrainingConfig or another "
            "LearningConfig; the arguments "
            "of `train` are config, starts and model, in this order"
        )
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
            "policy)`; pass "
            "the function itself and do not call it"
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
