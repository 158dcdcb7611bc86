"""The proof of off-policy learning: its table, the interval of a gain, and options that its recipes know."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import off_policy_proof
from benchmarks.kept_runs import keep
from vla_rl.cli.command_line import TrainingLaunch, parse_command
from vla_rl.recipes.dagger_libero import DaggerLiberoConfig
from vla_rl.recipes.off_policy_libero import OffPolicyLiberoConfig
from vla_rl.recipes.srpo_libero import SrpoLiberoConfig

RECIPES: dict[str, Any] = {
    "dagger_libero": DaggerLiberoConfig,
    "off_policy_libero": OffPolicyLiberoConfig,
    "srpo_libero": SrpoLiberoConfig,
}
LINE = {
    "run": "dagger/0",
    "outcomes_before": {"libero_goal/7": "10" * 10, "libero_object/1": "0" * 20},
    "outcomes_after": {"libero_goal/7": "11" * 10, "libero_object/1": "0" * 15 + "1" * 5},
    "env_steps": 23456,
    "cpu_seconds": 1678,
}


@pytest.mark.parametrize("method", off_policy_proof.METHODS)
def test_the_options_of_every_run_are_options_of_its_recipe(method: str) -> None:
    planned = off_policy_proof.METHODS[method]
    arguments = ["--run.seed", "1", *off_policy_proof.STARTS, *planned.options]
    config = parse_command(TrainingLaunch, RECIPES[planned.recipe], "", arguments).config
    assert config.run.seed == 1


def test_a_gain_has_an_interval_over_the_same_starts_and_all_control_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "kept.jsonl"
    keep(kept, LINE, lambda line: str(line["run"]))
    monkeypatch.setattr(sys, "argv", ["off_policy_proof", "--table", "--keep", str(kept)])
    assert off_policy_proof.main() == 0
    *table, last = capfd.readouterr().out.splitlines()
    assert table[-1].startswith(
        "| dagger/0 | 23,456 | 1,678 | 25 (14 to 40) | 62 (47 to 76) | +38 ("
    )
    assert table[-1].endswith("libero_goal/7 10 to 20 of 20, libero_object/1 0 to 5 of 20 |")
    figures = json.loads(last)
    assert figures["gain"] == [37.5]
    assert 15 < figures["gain_low"][0] < 37.5 < figures["gain_high"][0] < 60
    assert off_policy_proof.__doc__ is not None
    assert all(f"`{name}`" in off_policy_proof.__doc__ for name in figures)
