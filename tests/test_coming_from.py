"""docs/coming_from.md names options that exist, and commands that parse."""

import dataclasses
import re
import shlex
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from vla_rl.cli.command_line import TrainingLaunch, parse_command
from vla_rl.types import Config

PAGE = (Path(__file__).parent.parent / "docs" / "coming_from.md").read_text()
SECTIONS = dict(re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE))


def config_of(recipe: str) -> type[Config]:
    """The configuration that a recipe's module defines for its command line."""
    module = import_module(f"vla_rl.recipes.{recipe}")
    wanted = f"{recipe.replace('_', '')}config"
    (found,) = [value for name, value in vars(module).items() if name.lower() == wanted]
    config: type[Config] = found
    return config


def is_option(config: Config, option: str) -> bool:
    """Whether `--learner.loss.clip-low` and the like is a field of the configuration, or of what
    starts a run.
    """
    path = option.removeprefix("--").replace("-", "_").split(".")
    if path[0] in {field.name for field in dataclasses.fields(TrainingLaunch)}:
        return len(path) == 1
    value: Any = config
    for name in path:
        if name not in getattr(value, "__struct_fields__", ()):
            return False
        value = getattr(value, name)
    return True


def test_the_page_compares_with_four_projects_in_thirty_rows_or_more() -> None:
    assert list(SECTIONS) == ["RLinf", "SimpleVLA-RL", "verl", "siiRL"]
    for name, body in SECTIONS.items():
        assert len(re.findall(r"^\| `", body, re.MULTILINE)) >= 7, name
    assert len(re.findall(r"^\| `", PAGE, re.MULTILINE)) >= 30


@pytest.mark.parametrize("project", SECTIONS)
def test_every_option_of_a_table_is_one_of_the_recipe_it_is_named_for(project: str) -> None:
    (recipe,) = re.findall(r"Recipe: `(\w+)`", SECTIONS[project])
    config = config_of(recipe)()
    options = set(re.findall(r"--[a-z][\w.-]*", SECTIONS[project]))
    assert len(options) > 10
    assert not [option for option in sorted(options) if not is_option(config, option)]


def test_the_options_named_above_the_tables_are_ones_of_the_libero_recipes() -> None:
    above = PAGE.partition("\n## ")[0]
    config = config_of("grpo_libero")()
    options = set(re.findall(r"--[a-z][\w.-]*", above))
    assert options
    assert not [option for option in sorted(options) if not is_option(config, option)]


@pytest.mark.parametrize("project", SECTIONS)
def test_the_command_of_each_section_parses_into_a_valid_configuration(project: str) -> None:
    (block,) = re.findall(r"```sh\n(.*?)```", SECTIONS[project], re.DOTALL)
    python, dash_m, module, *arguments = shlex.split(block.replace("\\\n", " "))
    (recipe,) = re.findall(r"Recipe: `(\w+)`", SECTIONS[project])
    assert (python, dash_m, module) == ("python", "-m", f"vla_rl.recipes.{recipe}")
    command = parse_command(TrainingLaunch, config_of(recipe), "", arguments)
    assert command.config.scheduler.max_staleness == 0
    assert command.config.group_size == 8


def test_an_option_that_does_not_exist_is_found() -> None:
    config = config_of("grpo_libero")()
    assert is_option(config, "--learner.loss.clip-low")
    assert is_option(config, "--resume")
    assert not is_option(config, "--learner.loss.clip-lo")
    assert not is_option(config, "--resume.path")
    assert not is_option(config, "--prompts")
