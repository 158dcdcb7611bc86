"""Faults that several tests of the doctor need."""

import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from vla_rl.cli.doctor import libraries
from vla_rl.cli.doctor.libraries import Probe
from vla_rl.models.shipped import BASE_POLICY


@pytest.fixture
def first_on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose modules every Python that is started finds before all others."""
    folder = tmp_path / "first"
    folder.mkdir()
    others = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{others}".rstrip(os.pathsep))
    return folder


@pytest.fixture
def probes_in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Probes of torch in this process, which has imported it: a new one does so for two seconds."""

    def tried(arguments: Sequence[str], seconds: float) -> Probe:
        with monkeypatch.context() as patch:
            patch.setattr(sys, "argv", list(arguments[::2]))
            try:
                exec(arguments[1], {})
            except Exception as error:
                return Probe(False, f"{type(error).__name__}: {error}")
        return Probe(True, "")

    monkeypatch.setattr(libraries, "run_probe", tried)


@pytest.fixture
def policy_copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(BASE_POLICY, tmp_path / "policy"))


@pytest.fixture
def smi(first_on_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int], None]:
    """An `nvidia-smi` that prints this and ends with this status."""

    def make(printed: str, status: int = 0) -> None:
        program = first_on_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\ncat <<'END'\n{printed}\nEND\nexit {status}\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{first_on_path}{os.pathsep}{os.environ['PATH']}")

    return make
