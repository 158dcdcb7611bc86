"""Rates by kind of change stand in one table, with a column for each suite."""

import io

from rich.console import Console

from vla_rl.evaluation.results import EpisodeResult
from vla_rl.evaluation.robustness import robustness_table


def result(suite: str, perturbation: str, is_success: bool) -> EpisodeResult:
    return EpisodeResult(
        suite=suite,
        task_id=0,
        task=f"{suite}/0",
        instruction="go",
        init_state_id=0,
        scene_seed=0,
        is_success=is_success,
        num_steps=5,
        attempts=1,
        perturbation=perturbation,
    )


def rows(*results: EpisodeResult) -> list[list[str]]:
    """Return the cells of each row, with rates and no intervals."""
    console = Console(file=io.StringIO(), width=200)
    console.print(robustness_table(results, "policy"))
    lines = [line for line in console.file.getvalue().splitlines() if line.startswith("│")]
    return [[cell.partition(" (")[0].strip() for cell in line[1:-1].split("│")] for line in lines]


def test_tasks_without_a_change_come_first() -> None:
    assert rows(
        result("libero_goal", "swap", False),
        result("libero_goal", "", True),
        result("libero_goal", "swap", True),
    ) == [["none", "1/1 = 100.0 %"], ["swap", "1/2 = 50.0 %"]]


def test_several_suites_have_a_column_each_and_one_together() -> None:
    assert rows(
        result("libero_goal", "", True),
        result("libero_object", "swap", False),
        result("libero_goal", "swap", True),
    ) == [
        ["none", "1/1 = 100.0 %", "-", "1/1 = 100.0 %"],
        ["swap", "1/1 = 100.0 %", "0/1 = 0.0 %", "1/2 = 50.0 %"],
    ]
