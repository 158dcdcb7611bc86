"""The proofs on flow policies: what a kept run has, and the table that is printed of the kept ones."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import flow_libero, flow_reach
from benchmarks.flow_runs import list_outcomes
from benchmarks.kept_runs import keep
from vla_rl.evaluation import EpisodeRecord

TASKS = ("libero_goal/7", "libero_goal/8")


def record(task: str, start: int, value: float) -> EpisodeRecord:
    return EpisodeRecord(
        task=task, start=start, seed=0, weights=0, member=0, value=value, parts={"steps": 80.0}
    )


def keep_run(path: Path, name: str, before: dict[str, str], after: dict[str, str]) -> None:
    line: dict[str, Any] = {
        "run": name,
        "outcomes_before": before,
        "outcomes_after": after,
        "env_steps": 12345,
        "cpu_seconds": 1678,
    }
    keep(path, line, lambda line: str(line["run"]))


def test_outcomes_are_of_each_task_in_the_order_of_its_starts() -> None:
    records = [record(TASKS[0], start, value) for start, value in ((42, 0.0), (40, 1.0), (41, 1.0))]
    records.append(record(TASKS[1], 40, 0.0))
    assert list_outcomes(records) == {TASKS[0]: "110", TASKS[1]: "0"}


def test_the_table_counts_all_starts_of_all_tasks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "kept.jsonl"
    keep_run(kept, "ppo/0", dict.fromkeys(TASKS, "1000"), {TASKS[0]: "1111", TASKS[1]: "1100"})
    monkeypatch.setattr(sys, "argv", ["flow_libero", "--table", "--keep", str(kept)])
    assert flow_libero.main() == 0
    *table, last = capfd.readouterr().out.splitlines()
    assert table[-1].startswith(
        "| ppo/0 | 12,345 | 1,678 | 25.0 (7 to 59) | 75.0 (41 to 93) | +50.0 |"
    )
    assert table[-1].endswith("| 1 to 4 of 4 | 1 to 2 of 4 |")
    figures = json.loads(last)
    assert (figures["before"], figures["after"], figures["gain"]) == ([25.0], [75.0], [50.0])
    assert flow_libero.__doc__ is not None
    assert all(f"`{name}`" in flow_libero.__doc__ for name in figures)


@pytest.mark.parametrize("benchmark", [flow_libero, flow_reach])
def test_without_runs_the_table_is_one_error(
    benchmark: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    kept = tmp_path / "kept.jsonl"
    monkeypatch.setattr(sys, "argv", ["benchmark", "--table", "--keep", str(kept)])
    assert benchmark.main() == 2
    assert capfd.readouterr().err == f"error: {kept} has no runs; leave out --table to run them\n"
