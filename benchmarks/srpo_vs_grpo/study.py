"""The study: its arms, what all of them share, and one run of an arm."""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import msgspec

from benchmarks.pipeline_curves import evaluated_lines, lines_of
from benchmarks.provenance import machine, versions
from benchmarks.srpo_vs_grpo.lines import ArmRun
from vla_rl.cli.command_line import TrainingLaunch, parse_command
from vla_rl.envs.libero.assets import PLACEHOLDER_ASSETS, find_assets
from vla_rl.evaluation.conditions import POLICY_DIGEST
from vla_rl.evaluation.held_out import conditions_path
from vla_rl.evaluation.record_file import read_records
from vla_rl.evaluation.records import SUCCESSES
from vla_rl.models.loading import CheckpointConfig, compute_digest
from vla_rl.models.shipped import BASE_POLICY
from vla_rl.recipes.grpo_libero import GrpoLiberoConfig
from vla_rl.recipes.srpo_libero import SrpoLiberoConfig
from vla_rl.reporting import RunDirectory

ARMS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "grpo": ("grpo_libero",),
        "srpo": ("srpo_libero",),
        "srpo_released": ("srpo_libero", "--srpo.rule", "released"),
    }
)
"""Recipe and options of each arm: binary reward, our rule, the rule of SRPO's released code."""

RECIPES: Final[Mapping[str, type[SrpoLiberoConfig]]] = MappingProxyType(
    {"grpo_libero": GrpoLiberoConfig, "srpo_libero": SrpoLiberoConfig}
)

NUM_UPDATES: Final = 12
SHARED: Final = (
    *("--policy", str(BASE_POLICY)),
    # the tasks of the demo that the base policy fails most
    *("--tasks", "libero_object/1,6"),
    *("--held-out.init-states", "40-49,1000-1041"),
    *("--run.updates", str(NUM_UPDATES)),
)

OF_THE_MACHINE: Final = ("run", "simulators", "policy", "cluster")
"""Settings that differ from run to run or by machine. The policy counts by the digest of its
files."""

LONGEST_RUN_S: Final = 5400.0
"""A run that takes longer hangs, or the machine is too busy for the study."""


def conditions() -> dict[str, Any]:
    """Return everything that all runs of the study share, as plain values.

    Raises: FileNotFoundError without LIBERO's assets; ValueError if only placeholder assets are there.
    """
    source = find_assets().source
    if source == PLACEHOLDER_ASSETS:
        raise ValueError(
            "only placeholder assets are there, expected LIBERO's own, which this study is about; install "
            "them with `vla-rl install assets`"
        )
    return {
        "arms": {arm: settings_of(arm) for arm in ARMS},
        "updates": NUM_UPDATES,
        "base_digest": compute_digest(CheckpointConfig().list_files(str(BASE_POLICY))),
        "assets": "configured" if source == "configured" else "LIBERO's own",
    }


def settings_of(arm: str) -> dict[str, Any]:
    """Return all settings of an arm that its results depend on, the recipe's defaults included."""
    recipe, *options = ARMS[arm]
    config = parse_command(TrainingLaunch, RECIPES[recipe], "", [*options, *SHARED]).config
    settings: dict[str, Any] = msgspec.to_builtins(config)
    # where the first weights' results come from changes no result
    del settings["held_out"]["first_results_of"]
    return {name: value for name, value in settings.items() if name not in OF_THE_MACHINE}


def run_arm(arm: str, seed: int, digest: str, first: Path) -> ArmRun:
    """Run one arm with one seed.

    Args:
        arm: name of the arm.
        seed: seed of the run.
        digest: digest of the conditions.
        first: folder with the held-out results of the base policy, which all runs start from. The
            first run makes it.

    Raises: CalledProcessError if the run fails, TimeoutExpired if it hangs; ValueError if a
    held-out start is missing.
    """
    recipe, *options = ARMS[arm]
    with tempfile.TemporaryDirectory() as root:
        command = [sys.executable, "-m", f"vla_rl.recipes.{recipe}", *options, *SHARED]
        if first.exists():
            command += ["--held-out.first-results-of", str(first)]
        began, started_at = time.perf_counter(), time.strftime("%Y-%m-%dT%H:%M:%S%z")
        subprocess.run(
            [*command, "--run.seed", str(seed), "--run.root", root],
            check=True,
            stdout=sys.stderr,
            timeout=LONGEST_RUN_S,
        )
        minutes = (time.perf_counter() - began) / 60
        (folder,) = Path(root).iterdir()
        run = RunDirectory.existing(folder)
        updates, evaluated = lines_of(run.path, seed), evaluated_lines(run.path, seed)
        if not first.exists():
            keep_first_results(run, first)
    return ArmRun(
        arm=arm,
        seed=seed,
        config_digest=digest,
        before=outcomes_of(evaluated, 0),
        after=outcomes_of(evaluated, NUM_UPDATES),
        success=tuple(line["rollout/success_rate"] for line in updates),
        episodes=tuple(int(line["episodes"]) for line in updates),
        training_minutes=updates[-1]["minutes"],
        minutes=round(minutes, 2),
        started_at=started_at,
        machine=machine(),
        versions=versions(),
    )


def keep_first_results(run: RunDirectory, first: Path) -> None:
    """Copy what the runs after `run` need of it to start with its results of the base policy."""
    policy = json.loads((run.path / "about.json").read_text())[POLICY_DIGEST]
    conditions = conditions_path(run)
    records = [each for each in read_records(run.path / SUCCESSES.file) if each.weights == 0]
    with tempfile.TemporaryDirectory(dir=first.parent) as made:
        folder = Path(made) / first.name
        folder.mkdir()
        (folder / "about.json").write_text(json.dumps({POLICY_DIGEST: policy}) + "\n")
        (folder / conditions.name).write_bytes(conditions.read_bytes())
        (folder / SUCCESSES.file).write_bytes(
            b"".join(msgspec.json.encode(record) + b"\n" for record in records)
        )
        folder.rename(first)


def outcomes_of(evaluated: Sequence[Mapping[str, Any]], weight_version: int) -> dict[str, str]:
    """Return each task's held-out outcomes in the order of the starts, 1 for solved.

    Raises: ValueError if a version has no episodes, or a start occurs twice.
    """
    found: dict[str, dict[int, bool]] = {}
    for line in evaluated:
        if line["weight_version"] == weight_version:
            of_task = found.setdefault(line["task"], {})
            if line["init_state_id"] in of_task:
                raise ValueError(
                    f"start {line['init_state_id']} of {line['task']} occurs twice for weights "
                    f"{weight_version}, expected every start once; repeat this run"
                )
            of_task[line["init_state_id"]] = line["is_success"]
    if not found:
        raise ValueError(
            f"weights {weight_version} have no held-out episodes; the run ended early: repeat it"
        )
    return {
        task: "".join(str(int(of_task[start])) for start in sorted(of_task))
        for task, of_task in sorted(found.items())
    }
