"""Limits that are too low are named: each test makes one fault happen."""

import resource
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from faults import words

from vla_rl.cli.doctor import (
    Patient,
    findings_at_start,
    limits,
)


def test_too_few_descriptors_are_named() -> None:
    def lower() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))

    code = (
        "from vla_rl.cli.doctor import Patient, limits; "
        "print(*limits.descriptors(Patient(num_envs=64)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, preexec_fn=lower
    )
    assert "may open 128 files, and 64 simulators need 7" in done.stdout, done.stderr
    assert "ulimit -n" in done.stdout


def test_a_small_folder_in_memory_is_named(tmp_path: Path) -> None:
    code = (
        "import sys; from vla_rl.cli.doctor import Patient, limits; "
        "print(*limits.shared_memory(Patient(shared_memory=sys.argv[1])))"
    )
    mounted = f'mount -t tmpfs -o size=1m tmpfs {shlex.quote(str(tmp_path))} && exec "$0" "$@"'
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mounted]
    done = subprocess.run(
        [*command, sys.executable, "-c", code, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    if "Operation not permitted" in done.stderr or "must be superuser" in done.stderr:
        pytest.skip("this machine allows no mounts")
    assert f"{tmp_path} has room for 1 MiB" in done.stdout, done.stderr
    assert "--shm-size" in done.stdout


def test_a_disk_that_is_too_small_for_the_checkpoints_is_named(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    patient = Patient(root=str(tmp_path / "runs"), checkpoint_bytes=free, keep_checkpoints=3)
    found = words(limits.disk(patient))
    assert "and 3 checkpoints" in found
    assert found in words(findings_at_start(patient))
    assert not words(limits.disk(Patient(root=str(tmp_path), checkpoint_bytes=1)))
