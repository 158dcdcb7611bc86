"""A machine with time, results in words, and modules that break."""

from collections.abc import Iterable
from pathlib import Path

from vla_rl.cli.doctor import CheckResult, Machine

MACHINE = Machine(seconds=150.0)  # a busy machine takes its time; nothing waits for it


def words(results: Iterable[CheckResult]) -> str:
    return "\n".join(str(result) for result in results)


def write_module(folder: Path, name: str, text: str) -> None:
    (folder / f"{name}.py").write_text(text)
