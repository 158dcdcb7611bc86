"""The page of guarantees names tests that exist, and a short fault campaign keeps its promises."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "guarantees.md"


def test_every_test_that_the_page_of_guarantees_names_exists() -> None:
    named = re.findall(r"`(test_\w+)`", PAGE.read_text())
    defined = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"def (test_\w+)", path.read_text())
    }
    assert len(named) > 60
    assert [name for name in named if name not in defined] == []


def test_every_promise_of_the_page_names_a_test() -> None:
    rows = [
        line
        for line in PAGE.read_text().splitlines()
        if line.startswith("| ") and "held by" not in line
    ]
    assert [row for row in rows if "`test_" not in row.rsplit("|", 2)[1]] == []


@pytest.mark.parametrize(
    "kind",
    [
        "fuzzed_hosts",
        # run/test_nothing_is_lost.py kills and freezes the simulators of a shorter run
        pytest.param("killed_simulators", marks=pytest.mark.proof),
    ],
)
def test_a_short_campaign_of_faults_finds_nothing(kind: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "benchmarks.faults",
            "--rounds",
            "1",
            "--seed",
            "7",
            "--kinds",
            kind,
        ],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["by_kind"] == {kind: {"tries": 1, "failures": 0}}
    assert (figures["lost_episodes"], figures["lost_metric_lines"], figures["left_behind"]) == (
        0,
        0,
        0,
    )
