"""The proof on a public language model, with a tiny one: runs that are missing are made and kept, and
the table compares them on the same sums.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import language_sums
from benchmarks.counted_cpu import CpuLimitExceeded, read_counted, run_counted
from benchmarks.kept_runs import kept_lines
from benchmarks.language_sums import gain_over_baseline, outcomes
from vla_rl.evaluation import EpisodeRecord
from vla_rl.models.language import TinyConfig, tiny

SHAPE = TinyConfig(
    hidden_size=32,
    num_layers=2,
    num_heads=2,
    intermediate_size=64,
    vocab_size=300,
    context_size=256,
)


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["language_sums", *arguments])
    return language_sums.main()


def test_a_run_that_is_missing_is_made_or_goes_on_is_kept_and_not_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    tiny(SHAPE, ["Add or subtract. 20 + 15 = 35"], seed=0).save(tmp_path / "policy")
    kept = tmp_path / "kept.jsonl"
    arguments = (
        f"--runs {tmp_path / 'runs'} --keep {kept} --only form/0 -- --run.updates 1 --run.device cpu "
        f"--policy {tmp_path / 'policy'} --group-size 2 --scheduler.groups-per-update 2 "
        "--text.num-envs 4 --num-validation 3 --engine.max-context 256"
    ).split()
    assert call(monkeypatch, *arguments) == 0
    (line,) = kept_lines(kept)
    assert (line["run"], line["settings"]["scorer"], len(line["success"])) == ("form/0", "form", 1)
    assert len(line["outcomes_before"]) == len(line["outcomes_after"]) == 3
    assert [sorted(each) for each in line["replies"]] == [["after", "before", "problem"]] * 3
    assert all(len(each["after"]) == 1 for each in line["replies"])
    assert line["cpu_seconds"] >= 1
    assert line["machine"]
    assert line["versions"]["torch"]
    last = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert last["runs"] == ["form/0"]
    assert last["gain"] == [None]
    assert call(monkeypatch, *arguments) == 0
    assert kept_lines(kept) == [line]
    kept.unlink()  # as if the command had been stopped before the run was kept
    assert call(monkeypatch, *arguments) == 0
    (again,) = kept_lines(kept)
    assert (again["outcomes_after"], again["replies"]) == (line["outcomes_after"], line["replies"])
    assert again["cpu_seconds"] > line["cpu_seconds"]
    assert again["minutes"] is None, "a pause is no cost of the run"


def test_without_runs_the_table_is_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "kept.jsonl"
    assert call(monkeypatch, "--table", "--keep", str(kept)) == 2
    assert capfd.readouterr().err == f"error: {kept} has no runs; leave out --table to run them\n"


def make_line(run: str, before: str, after: str) -> dict[str, Any]:
    return {"run": run, "outcomes_before": before, "outcomes_after": after}


def test_the_gain_is_over_the_better_of_base_and_form_baseline_on_the_same_sums() -> None:
    base, form = "0001" * 10, "0011" * 10
    exact = make_line("digits/0", base, "1111" * 10)
    lines = [make_line("form/0", base, form), exact]
    gain = gain_over_baseline(exact, lines)
    assert gain is not None
    assert gain[0] == 50.0
    assert gain[1] < 50.0 < gain[2]
    worse = gain_over_baseline(exact, [make_line("form/0", base, "0000" * 10), exact])
    assert worse is not None
    assert worse[0] == 75.0
    assert gain_over_baseline(exact, [exact]) is None
    assert gain_over_baseline(lines[0], lines) is None


def test_outcomes_are_right_answers_in_the_order_of_the_sums() -> None:
    records = [
        EpisodeRecord(
            task="sum",
            start=start,
            seed=0,
            weights=0,
            member=0,
            value=1.0,
            parts={"success": success},
        )
        for start, success in ((2, 0.0), (0, 1.0), (1, 0.0))
    ]
    assert outcomes(records) == "100"  # the form alone earns 1, and is no success


BUSY = "import time\nwhile time.process_time() < {}: pass"
WITH_CHILD = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', '''{BUSY}'''])"


def test_the_seconds_of_children_and_of_earlier_calls_are_counted(tmp_path: Path) -> None:
    counted = tmp_path / "cpu_seconds"
    command = [sys.executable, "-c", WITH_CHILD.format(0.5)]
    first = run_counted(command, counted, limit_s=60.0)
    assert first >= 0.5
    second = run_counted(command, counted, limit_s=60.0)
    assert second >= first + 0.5
    assert read_counted(counted) == pytest.approx(second, abs=0.01)


def test_a_command_above_its_limit_is_stopped_and_one_that_fails_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.counted_cpu.POLL_S", 0.1)
    with pytest.raises(CpuLimitExceeded, match="expected at most 1; take fewer updates"):
        run_counted([sys.executable, "-c", BUSY.format(600)], tmp_path / "long", limit_s=1.0)
    with pytest.raises(subprocess.CalledProcessError):
        run_counted([sys.executable, "-c", "raise SystemExit(3)"], tmp_path / "failed", limit_s=9.0)
