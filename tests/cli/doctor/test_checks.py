"""`vla-rl doctor` and the start of a recipe make every check and print what each found."""

import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from faults import words
from toy_runs import small_run

from vla_rl.cli.command_line import Command, TrainingLaunch
from vla_rl.cli.doctor import (
    CHECKS,
    Finding,
    Patient,
    examine,
)
from vla_rl.cli.doctor.trial import try_apart
from vla_rl.cli.launching import launch
from vla_rl.cli.plan import EpisodeFootprint
from vla_rl.models.loading import BASE_POLICY
from vla_rl.recipes.srpo_toy import new_policy, training_starts

PROGRAM = [sys.executable, "-m", "vla_rl.cli.main", "doctor"]


async def test_a_recipe_prints_what_is_found_at_its_start(
    smi: Callable[[str, int], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Stopped(Exception): ...

    async def stop(*args: object, **options: object) -> None:
        raise Stopped

    smi("NVIDIA H100 80GB HBM3, 81559, 40000", 0)
    monkeypatch.setattr("vla_rl.run.train.train", stop)
    config = small_run(tmp_path)
    footprint = EpisodeFootprint(
        what_runs="toy", simulator_mb=1, server_mb=1, chunk_bytes=1, num_chunks=1
    )
    with pytest.raises(Stopped):
        await launch(
            Command(TrainingLaunch(), config),
            training_starts(config),
            new_policy(config),
            footprint,
        )
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: GPU 0 (NVIDIA H100 80GB HBM3) has 40.6 of 79.6 GiB in use")


def test_a_check_that_fails_or_hangs_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(patient: Patient) -> Iterable[Finding]:
        raise OSError("no such thing")

    def endless(patient: Patient) -> Iterable[Finding]:
        try_apart(["-c", "import time; time.sleep(600)"], 600.0)
        return ()

    checks = {"broken": broken, "endless": endless, "fine": lambda patient: ()}
    monkeypatch.setattr("vla_rl.cli.doctor.checks.CHECKS", checks)
    found = examine(Patient(seconds=1.0))
    assert "broken failed (OSError: no such thing)" in words(found["broken"])
    assert "was not finished within 1 s" in words(found["endless"])
    assert not found["fine"]


def test_the_program_prints_each_check_and_its_findings_and_ends_with_their_status(
    tmp_path: Path,
) -> None:
    soonest = ["descriptors", "shared memory", "disk"]
    code = (
        "import sys; from vla_rl.cli.doctor import main; from vla_rl.cli.doctor import checks\n"
        f"checks.CHECKS = {{name: checks.CHECKS[name] for name in {soonest}}}; sys.exit(main())"
    )
    arguments = ["--root", str(tmp_path), "--shared-mib", "0"]
    program = [sys.executable, "-c", code, *arguments]
    fine = subprocess.run(program, capture_output=True, text=True, timeout=60)
    assert re.fullmatch(
        r"descriptors: in order\nshared memory: in order\ndisk: in order\n0 errors, [\d.]+ s\n",
        fine.stdout,
    ), fine.stderr
    assert fine.returncode == 0
    free = str(shutil.disk_usage(tmp_path).free)
    full = subprocess.run(
        [*program, "--checkpoint-bytes", free], capture_output=True, text=True, timeout=60
    )
    assert re.search(
        r"\ndisk:\n  error: .* and 2 checkpoints.*\.\n    .*\n1 errors", full.stdout, re.S
    )
    assert full.returncode == 1


# each of the checks has tests above; here they are made at once, by the program itself
@pytest.mark.proof
def test_the_program_looks_at_everything_in_its_time(tmp_path: Path) -> None:
    arguments = ["--root", str(tmp_path), "--checkpoint", str(BASE_POLICY), "--seconds", "120"]
    done = subprocess.run(
        [*PROGRAM, *arguments], capture_output=True, text=True, timeout=200, check=False
    )
    assert all(f"\n{name}:" in f"\n{done.stdout}" for name in CHECKS), done.stderr
    assert "torch, torchvision, attention: in order" in done.stdout
    assert "the policy: in order" in done.stdout
    assert re.search(r"\d+ errors, [\d.]+ s\n$", done.stdout)
    assert done.returncode == (0 if "\n0 errors" in done.stdout else 1)
