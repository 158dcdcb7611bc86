"""Finished runs that are kept as lines of a file: what every such line has, how it is added, and the
command line of the benchmarks that do so.
"""

import argparse
import datetime
import json
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from benchmarks.provenance import PACKAGES, machine
from vla_rl.errors import VlaRlError
from vla_rl.evaluation.record_file import complete_lines
from vla_rl.reporting import RunDirectory
from vla_rl.util.appended_file import AppendedFile


def command_line(description: str) -> argparse.ArgumentParser:
    """Return the options of a benchmark that reads a run, or the kept ones."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, nargs="?", help="folder of a finished run")
    parser.add_argument("--keep", type=Path, help="append the run to this file")
    parser.add_argument("--note", default="", help="what else ran on the machine; kept too")
    parser.add_argument("--table", type=Path, help="print the runs of this file")
    return parser


def report(parser: argparse.ArgumentParser, show: Callable[[argparse.Namespace], None]) -> int:
    """Show what the command line asks for; return the exit status, 2 with a line for bad input."""
    options = parser.parse_args()
    if (options.run is None) == (options.table is None):
        parser.error("expected the folder of a run, or --table and a file of kept runs")
    try:
        show(options)
    except (VlaRlError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


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
    return [json.loads(line) for line in complete_lines(path).splitlines()]


def read_json(path: Path) -> dict[str, Any]:
    """Read an object."""
    found: dict[str, Any] = json.loads(path.read_text())
    return found
