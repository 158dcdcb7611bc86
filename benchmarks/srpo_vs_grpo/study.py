"""The study: its arms, what all of them share, and one run of an arm."""

import importlib.metadata
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from benchmarks.pipeline_curves import judged_lines_of, lines_of
from benchmarks.srpo_vs_grpo.lines import ArmRun
from vla_rl.envs.libero.assets import STAND_INS, find_assets
from vla_rl.models.loading import BASE_POLICY, CheckpointFormat, digest_of
from vla_rl.observe import RunDirectory
from vla_rl.observe.versions import git_commit

ARMS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "grpo": ("grpo_libero",),
        "srpo": ("srpo_libero",),
        "srpo_released": ("srpo_libero", "--srpo.rule", "released"),
    }
)
"""Recipe and options of each arm: binary reward, our rule, the rule of SRPO's released code."""

TASKS: Final = ("libero_object/1,6",)
"""The tasks of the demo that the base policy fails most."""

STARTS: Final = "40-49,1000-1041"
NUM_UPDATES: Final = 12
SHARED: Final = (
    *("--policy", str(BASE_POLICY)),
    *("--tasks", *TASKS),
    *("--held-out.init-states", STARTS),
    *("--run.updates", str(NUM_UPDATES)),
)

LONGEST_RUN_S: Final = 5400.0
"""A run that takes longer hangs, or the machine is too busy for the study."""

PACKAGES: Final = ("torch", "numpy", "mujoco", "robosuite", "hf-libero", "transformers")


def conditions() -> dict[str, Any]:
    """Return everything that all runs of the study share, as plain values.

    Raises: FileNotFoundError without LIBERO's assets; ValueError if only stand-ins are there.
    """
    source = find_assets().source
    if source == STAND_INS:
        raise ValueError(
            "the assets are stand-ins, expected LIBERO's own, which this study is about; install "
            "them with `vla-rl install assets`"
        )
    return {
        "arms": {arm: list(options) for arm, options in ARMS.items()},
        "tasks": list(TASKS),
        "held_out_starts": STARTS,
        "updates": NUM_UPDATES,
        "base_digest": digest_of(CheckpointFormat().opened(str(BASE_POLICY))),
        "assets": "configured" if source == "configured" else "LIBERO's own",
    }


def machine() -> str:
    """Describe this machine in a few words."""
    models = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return f"{len(models)} cores of {models[0] if models else platform.processor()}"


def versions() -> dict[str, str]:
    """Return the versions that a run depends on, and the commit."""
    return {
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in PACKAGES},
        "commit": git_commit(Path(__file__).parent) or "unknown",
    }


def run_arm(arm: str, seed: int, digest: str) -> ArmRun:
    """Run one arm with one seed.

    Raises: CalledProcessError if the run fails, TimeoutExpired if it hangs; ValueError if a
    held-out start is missing.
    """
    recipe, *options = ARMS[arm]
    with tempfile.TemporaryDirectory() as root:
        command = [sys.executable, "-m", f"vla_rl.recipes.{recipe}", *options, *SHARED]
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
        updates, judged = lines_of(run.path, seed), judged_lines_of(run.path, seed)
    return ArmRun(
        arm=arm,
        seed=seed,
        config_digest=digest,
        before=outcomes_of(judged, 0),
        after=outcomes_of(judged, NUM_UPDATES),
        success=tuple(line["rollout/success_rate"] for line in updates),
        episodes=tuple(int(line["episodes"]) for line in updates),
        training_minutes=updates[-1]["minutes"],
        minutes=round(minutes, 2),
        started_at=started_at,
        machine=machine(),
        versions=versions(),
    )


def outcomes_of(judged: Sequence[Mapping[str, Any]], weight_version: int) -> dict[str, str]:
    """Return each task's held-out outcomes in the order of the starts, 1 for solved.

    Raises: ValueError if a version has no episodes, or a start occurs twice.
    """
    found: dict[str, dict[int, bool]] = {}
    for line in judged:
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
