"""What is wrong with the arguments of a run is said before anything starts."""

from typing import Any

import pytest

from vla_rl.errors import ConfigError
from vla_rl.graph import Pipeline
from vla_rl.learner import CriticConfig
from vla_rl.pipelines.config import RunConfig, TrainingConfig
from vla_rl.pipelines.registry import customise_pipeline, refuse_unused_settings
from vla_rl.rollout import TaskStart
from vla_rl.run.train import check_arguments
from vla_rl.types import EnvSpec

START = TaskStart(env=EnvSpec(id="x"), task="x")


async def nothing(update: int) -> None: ...


def pipeline() -> Pipeline:
    return Pipeline("mine", inputs="update").add_node("nothing", nothing, reads="update")


@pytest.mark.parametrize(
    ("config", "starts", "agent", "message"),
    [
        ("fast", [START], None, "config is of type str, expected a TrainingConfig"),
        (TrainingConfig(), START, None, "starts is of type TaskStart, expected a list"),
        (TrainingConfig(), [], None, "starts is empty"),
        (TrainingConfig(), [START, "x"], None, r"starts\[1\] is of type str"),
        (TrainingConfig(), [START], 3, "agent is of type int, expected a function"),
    ],
)
def test_a_wrong_argument_is_named(config: Any, starts: Any, agent: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_arguments(config, starts, agent)


def test_a_forgotten_return_is_suspected() -> None:
    with pytest.raises(ConfigError, match=r"customise returned None, .* is a `return` missing"):
        customise_pipeline(pipeline(), lambda each: None)
    assert customise_pipeline(pipeline(), lambda each: each).id == "mine"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (TrainingConfig(run=RunConfig(videos_every=2)), "run.videos_every is 2, .* no videos"),
        (TrainingConfig(critic=CriticConfig(epochs=9)), "critic.epochs is 9, .* has no critic"),
    ],
)
def test_a_setting_is_refused_only_if_nothing_reads_it(
    config: TrainingConfig, message: str
) -> None:
    graph = pipeline().build()
    with pytest.raises(ConfigError, match=message):
        refuse_unused_settings(config, graph, has_critic=False, makes_videos=False)
    refuse_unused_settings(config, graph, has_critic=True, makes_videos=True)
