"""A default is never the reason why a setting of the user is refused: it follows."""

import contextlib
import importlib
import io
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import vla_rl.recipes
from vla_rl.cli.command_line import TrainingLaunch, parse_command
from vla_rl.cli.following_defaults import FOLLOWING, follow
from vla_rl.errors import ConfigError
from vla_rl.pipelines.config import LearningConfig
from vla_rl.recipes.grpo_prompts import GrpoPromptsConfig

SWEPT = {
    "group-size": (2, 3),
    "scheduler.groups-per-update": (1, 3),
    "scheduler.max-staleness": (0,),
    "scheduler.max-outstanding-groups": (1, 2),
    "simulators.num-envs": (1, 3),
    "simulators.envs-per-process": (2,),
    "text.num-envs": (1, 3),
    "learner.ranks": (2, 3),
    "learner.tensor-parallel": (2,),
    "learner.minibatch-trajectories": (1, 3),
    "learner.micro-batch": (1, 3),
    "learner.epochs": (2,),
    "learner.optimizer.warmup-steps": (0, 1000),
    "learner.optimizer.decay-steps": (1, 10),
    "critic.minibatch-trajectories": (1,),
    "critic.optimizer.decay-steps": (1,),
    "engine.max-batch": (1, 4),
    "run.updates": (1,),
    "run.checkpoint-every": (1,),
    "held-out.every": (1,),
}
"""Options, and small values of each."""

PAIRS = (
    ("--group-size", "8", "--scheduler.groups-per-update", "2"),
    ("--group-size", "2", "--scheduler.groups-per-update", "1", "--scheduler.max-staleness", "0"),
)


def recipes() -> Iterator[Any]:
    """The configuration of each recipe that trains by reinforcement learning."""
    for found in pkgutil.iter_modules(vla_rl.recipes.__path__):
        module = importlib.import_module(f"vla_rl.recipes.{found.name}")
        name = f"{found.name.replace('_', '')}config"
        for kind in list(vars(module).values()):
            if (
                isinstance(kind, type)
                and issubclass(kind, LearningConfig)
                and kind.__module__ == module.__name__
                and kind.__name__.lower() == name
                and not found.name.endswith("_training")
            ):
                yield kind


def parsed(kind: Any, *arguments: str) -> Any:
    return parse_command(TrainingLaunch, kind, "", list(arguments)).config


def refusal(kind: Any, *arguments: str) -> str:
    """The error of a command line; empty if there is none."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed), contextlib.redirect_stdout(io.StringIO()):
            parsed(kind, *arguments)
    except ConfigError as error:
        return str(error)
    except SystemExit:
        return " ".join(printed.getvalue().split())
    return ""


@pytest.mark.parametrize("kind", [*recipes()], ids=lambda kind: kind.__name__)
def test_no_setting_is_refused_because_of_an_option_that_the_user_did_not_set(kind: Any) -> None:
    lines = [(f"--{name}", str(value)) for name, values in SWEPT.items() for value in values]
    found = {line: refusal(kind, *line) for line in (*lines, *PAIRS)}
    # an option that the recipe has not, or does not read, is the user's own
    refused = {
        line: words
        for line, words in found.items()
        if words and "nothing would read it" not in words and "nrecognized" not in words
    }
    assert refused == {}


def test_the_number_of_conversations_follows_the_size_of_an_update() -> None:
    arguments = ("--group-size", "8", "--scheduler.groups-per-update", "2")
    assert parsed(GrpoPromptsConfig, *arguments).text.num_envs == 32
    assert parsed(GrpoPromptsConfig, "--group-size=16").text.num_envs == 64
    assert parsed(GrpoPromptsConfig).text.num_envs == 64


def test_a_command_without_any_option_takes_the_recipe_s_defaults() -> None:
    assert parsed(GrpoPromptsConfig) == GrpoPromptsConfig()


def test_what_the_user_set_himself_is_refused() -> None:
    arguments = ("--group-size", "8", "--scheduler.groups-per-update", "2", "--text.num-envs", "64")
    assert "32 < num_envs = 64: 32 environments would never be used" in refusal(
        GrpoPromptsConfig, *arguments
    )


def test_a_default_follows_a_file_and_what_the_file_sets_is_the_user_s(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("group_size = 4\n[scheduler]\ngroups_per_update = 2\n")
    assert parsed(GrpoPromptsConfig, "--config", str(file)).text.num_envs == 16
    file.write_text("group_size = 4\n[scheduler]\ngroups_per_update = 2\n[text]\nnum_envs = 64\n")
    assert "16 < num_envs = 64" in refusal(GrpoPromptsConfig, "--config", str(file))


def test_each_default_that_follows_is_listed_once_and_keeps_what_fits() -> None:
    assert len({each.option for each in FOLLOWING}) == len(FOLLOWING)
    options: dict[str, Any] = {
        "group_size": 8,
        "scheduler": {"groups_per_update": 4, "max_staleness": 1},
    }
    options |= {"simulators": {"num_envs": 16}}
    options["scheduler"]["max_outstanding_groups"] = None
    assert follow(options, {}, ["--group-size", "4"]) == {"simulators": {"num_envs": 16}}
    assert follow(options, {}, ["--group-size", "1"]) == {"simulators": {"num_envs": 8}}
    assert follow(options, {}, ["--run.updates", "4"]) == {}
