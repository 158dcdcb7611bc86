"""A patient with time, findings in words, and modules that break."""

from collections.abc import Iterable
from pathlib import Path

from vla_rl.cli.doctor import CheckResult, Machine

PATIENT = Machine(seconds=150.0)  # a busy machine takes its time; nothing waits for it


def words(findings: Iterable[CheckResult]) -> str:
    return "\n".join(str(finding) for finding in findings)


def write_module(folder: Path, name: str, text: str) -> None:
    (folder / f"{name}.py").write_text(text)
