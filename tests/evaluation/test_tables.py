"""Tables of evaluated episodes: intervals of their means, counts, titles, results.json."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from toy_runs import evaluated, scored

from vla_rl.evaluation.records import EpisodeRecord, group_by_task
from vla_rl.evaluation.tables import (
    bootstrap_interval,
    change_table,
    compute_mean,
    summarise_records,
    table_title,
    weights_table,
    wilson_interval,
    write_results,
)


@pytest.mark.parametrize(
    ("num_successes", "num", "low", "high"),
    # worked out by hand for 0 of 1, where centre and half are both z^2/2 / (1 + z^2); the others
    # from Wilson's equation solved as a quadratic: (p - x)^2 = z^2 x (1 - x) / n
    [
        (0, 1, 0.0, 0.793450),
        (8, 10, 0.490163, 0.943318),
        (485, 500, 0.951096, 0.981737),
        (10, 10, 0.722467, 1.0),
    ],
)
def test_wilson_s_interval(num_successes: int, num: int, low: float, high: float) -> None:
    found = wilson_interval(num_successes, num)
    assert found == pytest.approx((low, high), abs=2e-6)
    z, rate = 1.959963984540054, num_successes / num
    for end in found:
        if 0 < end < 1:
            assert (rate - end) ** 2 == pytest.approx(z * z * end * (1 - end) / num, abs=1e-9)


def test_an_interval_of_no_episode_is_refused() -> None:
    with pytest.raises(ValueError, match="0 of 0 episodes"):
        wilson_interval(0, 0)


def test_the_bootstrap_s_interval_is_about_the_normal_one_and_within_what_a_score_can_be() -> None:
    draws = np.random.default_rng(3).normal(0.5, 0.1, 200)
    low, high = bootstrap_interval(list(draws))
    half = 1.96 * draws.std() / np.sqrt(200)
    assert (low, high) == pytest.approx((draws.mean() - half, draws.mean() + half), abs=0.15 * half)
    assert bootstrap_interval([1.0, 1.0, 0.9]) == pytest.approx((0.9, 1.0), abs=0.04)
    assert bootstrap_interval([0.5]) == (0.5, 0.5)


def test_the_interval_of_the_same_scores_is_the_same() -> None:
    scores = [0.0, 0.5, 0.5, 1.0]
    assert bootstrap_interval(scores) == bootstrap_interval(scores)
    found = compute_mean(scores, "score")
    assert (found.episodes, found.mean) == (4, 0.5)
    assert compute_mean([0.0, 1.0], "success_rate")[2:] == wilson_interval(1, 2)


def steps(num: int) -> dict[str, float]:
    return {"steps": float(num), "attempts": 1.0}


def test_a_summary_counts_by_task() -> None:
    records = [
        evaluated("goal/10", 0, False, parts=steps(300)),
        evaluated("goal/2", 0, True, parts=steps(80)),
        evaluated("goal/2", 1, True, parts=steps(120)),
        evaluated("goal/2", 2, False, parts=steps(300)),
    ]
    found = summarise_records(group_by_task(records)["goal/2"])
    assert (found["successes"], found["episodes"], found["mean_steps_of_successes"]) == (2, 3, 100)
    assert summarise_records([evaluated(is_success=False)])["mean_steps_of_successes"] is None


RECORDS = [
    evaluated("goal/1"),
    evaluated("object/0", is_success=False),
    evaluated("goal/0", is_success=False),
    evaluated("goal/1", is_success=False, perturbation="swap"),
]


def test_rates_are_by_suite_change_and_task(tmp_path: Path) -> None:
    write_results(tmp_path / "results.json", {"seed": 0}, RECORDS, num_planned=6, num_missing=2)
    found = json.loads((tmp_path / "results.json").read_bytes())
    assert found["summary"]["success_rate"] == 0.25
    assert {name: part["episodes"] for name, part in found["suites"].items()} == {
        "goal": 3,
        "object": 1,
    }
    assert found["perturbations"]["swap"]["episodes"] == 1
    assert list(found["tasks"]) == ["goal/0", "goal/1", "object/0"]
    assert found["tasks"]["goal/1"]["successes"] == 1
    assert len(found["episodes"]) == 4
    assert (found["planned_episodes"], found["missing_episodes"]) == (6, 2)
    assert not found["is_complete"]
    assert found["conditions"] == {"seed": 0}
    assert found["versions"]


def test_a_title_names_checkpoint_and_conditions() -> None:
    conditions = {"assets": "stand-ins", "seed": 3, "libero": "plus"}
    assert table_title("mine", conditions, num_planned=4, num_missing=0) == (
        "mine, libero: plus, assets: stand-ins"
    )


def test_the_title_of_an_interrupted_evaluation_warns_of_its_rates() -> None:
    title = table_title("mine", {}, num_planned=4, num_missing=1)
    assert title.startswith("mine; incomplete: 3 of 4 episodes, those running were lost")


def table_rows(*records: EpisodeRecord) -> list[list[str]]:
    """Return the cells of each row, with rates and no intervals."""
    console = Console(file=io.StringIO(), width=200)
    console.print(change_table(records, "policy"))
    lines = [line for line in console.file.getvalue().splitlines() if line.startswith("│")]
    return [[cell.partition(" (")[0].strip() for cell in line[1:-1].split("│")] for line in lines]


def test_tasks_without_a_change_come_first() -> None:
    assert table_rows(
        evaluated("libero_goal/0", is_success=False, perturbation="swap"),
        evaluated("libero_goal/0", is_success=True, perturbation=""),
        evaluated("libero_goal/0", is_success=True, perturbation="swap"),
    ) == [["none", "1/1 = 100.0 %"], ["swap", "1/2 = 50.0 %"]]


def test_several_suites_have_a_column_each_and_one_together() -> None:
    assert table_rows(
        evaluated("libero_goal/0", is_success=True, perturbation=""),
        evaluated("libero_object/0", is_success=False, perturbation="swap"),
        evaluated("libero_goal/0", is_success=True, perturbation="swap"),
    ) == [
        ["none", "1/1 = 100.0 %", "-", "1/1 = 100.0 %"],
        ["swap", "1/1 = 100.0 %", "0/1 = 0.0 %", "1/2 = 50.0 %"],
    ]


def test_scores_have_a_row_for_each_part_and_a_column_for_each_weight_version() -> None:
    table = weights_table(
        [
            scored(weights, start, 0.5 + weights * 0.25, comfort=1.0)
            for weights in (0, 1)
            for start in (0, 1)
        ],
        "score",
    )
    assert [column.header for column in table.columns] == ["part", "weights 0", "weights 1"]
    assert [[*column.cells] for column in table.columns] == [
        ["total", "comfort"],
        ["0.500 (0.500 to 0.500), n = 2", "1.000 (1.000 to 1.000), n = 2"],
        ["0.750 (0.750 to 0.750), n = 2", "1.000 (1.000 to 1.000), n = 2"],
    ]


NONE = "0/1 = 0.0 % (0.0 to 79.3)"


def test_successes_have_a_row_for_each_task_and_one_for_all() -> None:
    table = weights_table(
        [evaluated("goal/7", weights=4), evaluated("goal/8", 1, False)], "success_rate"
    )
    assert [*table.columns[0].cells] == ["goal/7", "goal/8", "all"]
    assert [*table.columns[1].cells] == ["-", NONE, NONE]
