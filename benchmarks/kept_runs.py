"""Finished runs that are kept as lines of a file: what every such line has, and how it is added."""

import datetime
import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from benchmarks.provenance import PACKAGES, machine
from vla_rl.evaluation.results import whole_lines
from vla_rl.graph import AppendedFile
from vla_rl.observe import RunDirectory


def about_run(run: RunDirectory, note: str) -> dict[str, Any]:
    """Return where a run comes from: note, machine, start, command, versions."""
    versions = read_json(run.path / "versions.json")
    packages = {name.replace("_", "-"): each for name, each in versions["packages"].items()}
    return {
        "note": note,
        "machine": machine(),
        "started_at": versions["started_at"],
        "command": versions["command"][1:],
        "versions": {
            "python": versions["python"].split()[0],
            **{name: packages.get(name) for name in PACKAGES},
            "commit": versions["commit"],
        },
    }


def minutes_until(run: RunDirectory, last: Path) -> float | None:
    """Return the minutes from a run's start to the last change of a file; None if it was resumed,
    because pauses would count.
    """
    if (run.path / "versions-2.json").exists():
        return None
    began = datetime.datetime.fromisoformat(read_json(run.path / "versions.json")["started_at"])
    return round((last.stat().st_mtime - began.timestamp()) / 60, 2)


def keep(path: Path, line: dict[str, Any], identity: Callable[[dict[str, Any]], str]) -> None:
    """Append the line of a run.

    Args:
        identity: what no two lines may have in common, in words.

    Raises: ValueError if there is a line of this identity already; OSError.
    """
    if identity(line) in map(identity, kept_lines(path)):
        raise ValueError(
            f"{path} has a run with {identity(line)} already, expected each once: a repeated seed is "
            "no new evidence"
        )
    with closing(AppendedFile(path, lines=True)) as file:
        file.write(json.dumps(line).encode() + b"\n", sync=True)


def kept_lines(path: Path) -> list[dict[str, Any]]:
    """Read the kept runs."""
    return [json.loads(line) for line in whole_lines(path).splitlines()]


def read_json(path: Path) -> dict[str, Any]:
    """Read an object."""
    found: dict[str, Any] = json.loads(path.read_text())
    return found
