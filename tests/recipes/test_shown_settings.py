"""The numbers that decide a training run stand in its recipe, and are those that it runs with."""

import ast
import inspect
import sys
from typing import Any

import pytest
from training_recipes import training_recipes

from vla_rl.cli.command_line import TrainingLaunch, parse_command

SHOWN = {"updates", "group_size", "groups_per_update", "lr", "clip_low", "clip_high"}


def stated_in(kind: Any) -> set[str]:
    """Return the names that a recipe gives a value, in its own file or in that of the recipe that it
    continues.
    """
    names = set()
    for each in kind.__mro__:
        module = each.__module__
        if not module.startswith("vla_rl.recipes.") or module.endswith("_training"):
            continue
        for node in ast.walk(ast.parse(inspect.getsource(sys.modules[module]))):
            if isinstance(node, ast.keyword) and node.arg is not None:
                names.add(node.arg)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                names.add(node.target.id)
    return names


@pytest.mark.parametrize("kind", training_recipes(), ids=lambda kind: kind.__name__)
def test_a_recipe_states_what_decides_its_run(kind: Any) -> None:
    assert stated_in(kind) >= SHOWN


@pytest.mark.parametrize("kind", training_recipes(), ids=lambda kind: kind.__name__)
def test_a_recipe_runs_with_what_it_states(kind: Any) -> None:
    # the settings of a pipeline replace those of a recipe, so that its file could state others
    stated, run = kind(), parse_command(TrainingLaunch, kind, "", []).config
    assert run.learner == stated.learner
    assert (run.run, run.group_size, run.temperature, run.scheduler) == (
        stated.run,
        stated.group_size,
        stated.temperature,
        stated.scheduler,
    )
