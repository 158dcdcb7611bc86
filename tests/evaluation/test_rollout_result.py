"""What `benchmarks.rollout_result` says of the rollout of finished runs."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks import rollout_result
from vla_rl.pipelines.config import RunConfig
from vla_rl.recipes.train_toy import TrainToyConfig
from vla_rl.reporting import RunDirectory


def a_run(root: Path, name: str, *steps_per_s: float) -> str:
    """A run with an update for each of these speeds."""
    run = RunDirectory.create(root, name, TrainToyConfig(run=RunConfig(name=name)), {})
    lines = [
        {"update": number, "rollout/env_steps_per_s": speed, "rollout/decisions_per_s": 2.0,
         "rollout/episodes_per_s": 0.5, "rollout/policy_busy_share": 0.25}
        for number, speed in enumerate(steps_per_s, start=1)
    ]  # fmt: skip
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(run.path)


def result(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["rollout_result", *arguments])
    return rollout_result.main()


def test_kept_runs_are_columns_of_the_first_updates_speeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = str(tmp_path / "kept.jsonl")
    for name, speeds in (("before", (50.0, 9.0)), ("after", (104.5, 9.0))):
        run = a_run(tmp_path, name, *speeds)
        assert result(monkeypatch, run, "--keep", kept, "--note", name) == 0
    capsys.readouterr()
    assert result(monkeypatch, "--table", kept) == 0
    *lines, figures = capsys.readouterr().out.splitlines()
    assert lines[0] == "|  | before | after |"
    assert "| control steps/s | 50 | 104 |" in lines
    assert json.loads(figures)["env_steps_per_s"] == [50.0, 104.5]


def test_a_run_that_is_kept_already_or_has_no_update_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = str(tmp_path / "kept.jsonl")
    run = a_run(tmp_path, "one", 50.0)
    assert result(monkeypatch, run, "--keep", kept) == 0
    assert result(monkeypatch, run, "--keep", kept) == 2
    assert "already, expected each once" in capsys.readouterr().err
    assert result(monkeypatch, a_run(tmp_path, "none")) == 2
    assert "no update of" in capsys.readouterr().err
