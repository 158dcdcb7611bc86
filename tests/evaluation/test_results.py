"""Results of episodes: their file, their counts, the intervals of their rates, their tables."""

import io
import json
from pathlib import Path

import pytest
from disks import SmallDisk
from rich.console import Console

from vla_rl.errors import ConfigError
from vla_rl.evaluation.results import (
    EpisodeResult,
    ResultFile,
    group_by_task,
    summarise_results,
    wilson_interval,
)
from vla_rl.evaluation.tables import robustness_table, table_title, write_results


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


def result(
    task_id: int, init_state_id: int, is_success: bool = True, num_steps: int = 100
) -> EpisodeResult:
    return EpisodeResult(
        suite="libero_goal",
        task_id=task_id,
        task=f"libero_goal/{task_id}",
        instruction="turn on the stove",
        init_state_id=init_state_id,
        scene_seed=0,
        is_success=is_success,
        num_steps=num_steps,
        attempts=1,
    )


def test_results_are_on_disk_as_they_come_and_a_torn_line_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "episodes.jsonl"
    with ResultFile(path) as file:
        file.add(result(1, 0))
        file.add(result(1, 1, is_success=False))
        assert len(path.read_bytes().splitlines()) == 2
    path.write_bytes(path.read_bytes() + b'{"suite": "libero_go')  # killed while it wrote
    with ResultFile(path) as file:
        assert list(file.results.values()) == [result(1, 0), result(1, 1, is_success=False)]
        file.add(result(2, 0))
    with ResultFile(path) as file:
        assert len(file.results) == 3


def test_results_that_find_no_room_are_kept_and_written_when_there_is_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path, disk = tmp_path / "episodes.jsonl", SmallDisk(monkeypatch)
    with ResultFile(path) as file:
        file.add(result(1, 0))
        disk.room = 50  # of a line of 180 bytes
        file.add(result(1, 1))
        file.add(result(1, 2))
        assert len(path.read_bytes().splitlines()) == 1
        assert (len(file.results), file.num_waiting) == (3, 2)
        disk.room = None
        assert file.num_waiting == 0
    assert list(ResultFile(path).results) == [("libero_goal/1", state, 0) for state in (0, 1, 2)]
    assert caplog.text.count("No space left on device") == 1


def test_an_episode_stands_in_the_results_once(tmp_path: Path) -> None:
    with ResultFile(tmp_path / "episodes.jsonl") as file:
        file.add(result(1, 0))
        with pytest.raises(ConfigError, match="twice, expected every episode once"):
            file.add(result(1, 0, is_success=False))


def test_a_line_that_is_no_result_is_named(tmp_path: Path) -> None:
    (tmp_path / "episodes.jsonl").write_text('{"suite": 3}\n')
    with pytest.raises(ConfigError, match=r"episodes\.jsonl, line 1 is not a result"):
        ResultFile(tmp_path / "episodes.jsonl")


def test_a_summary_counts_by_task() -> None:
    results = [
        result(10, 0, False, 300),
        result(2, 0, True, 80),
        result(2, 1, True, 120),
        result(2, 2, False, 300),
    ]
    assert list(group_by_task(results)) == ["libero_goal/2", "libero_goal/10"]
    found = summarise_results(group_by_task(results)["libero_goal/2"])
    assert (found["successes"], found["episodes"], found["mean_steps_of_successes"]) == (2, 3, 100)
    assert summarise_results([result(1, 0, False)])["mean_steps_of_successes"] is None


def result_in_suite(
    suite: str, task_id: int, is_success: bool, perturbation: str = ""
) -> EpisodeResult:
    return EpisodeResult(
        suite=suite,
        task_id=task_id,
        task=f"{suite}/{task_id}",
        instruction="go",
        init_state_id=0,
        scene_seed=0,
        is_success=is_success,
        num_steps=5,
        attempts=1,
        perturbation=perturbation,
    )


RESULTS = [
    result_in_suite("goal", 1, True),
    result_in_suite("object", 0, False),
    result_in_suite("goal", 0, False),
    result_in_suite("goal", 1, False, "swap"),
]


def test_rates_are_by_suite_change_and_task(tmp_path: Path) -> None:
    write_results(tmp_path / "results.json", {"seed": 0}, RESULTS, num_planned=6, num_missing=2)
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


def result_of_change(suite: str, perturbation: str, is_success: bool) -> EpisodeResult:
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


def table_rows(*results: EpisodeResult) -> list[list[str]]:
    """Return the cells of each row, with rates and no intervals."""
    console = Console(file=io.StringIO(), width=200)
    console.print(robustness_table(results, "policy"))
    lines = [line for line in console.file.getvalue().splitlines() if line.startswith("│")]
    return [[cell.partition(" (")[0].strip() for cell in line[1:-1].split("│")] for line in lines]


def test_tasks_without_a_change_come_first() -> None:
    assert table_rows(
        result_of_change("libero_goal", "swap", False),
        result_of_change("libero_goal", "", True),
        result_of_change("libero_goal", "swap", True),
    ) == [["none", "1/1 = 100.0 %"], ["swap", "1/2 = 50.0 %"]]


def test_several_suites_have_a_column_each_and_one_together() -> None:
    assert table_rows(
        result_of_change("libero_goal", "", True),
        result_of_change("libero_object", "swap", False),
        result_of_change("libero_goal", "swap", True),
    ) == [
        ["none", "1/1 = 100.0 %", "-", "1/1 = 100.0 %"],
        ["swap", "1/1 = 100.0 %", "0/1 = 0.0 %", "1/2 = 50.0 %"],
    ]
