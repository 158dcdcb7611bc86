"""The result of a finished run on held-out starts: `python -m benchmarks.demo_result runs/<run>`.

Compares the starts that both the first and the last evaluated weights were tried from. Runs
nothing.

Keys of the last line: `before` and `after`, the success rates in percent, and `points_gained`, their
difference; `starts`; `updates`; `minutes`, from the start of the command to its last held-out
episode (None if the run was resumed, because pauses would count); `assets`: `package` for LIBERO's
own from installed packages, else their source, such as `stand-ins`; `quality` and `physics` of the
held-out episodes; `seed`.
"""

import argparse
import datetime
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from benchmarks.interleaved import print_json_line
from vla_rl.errors import VlaRlError
from vla_rl.evaluation.held_out import (
    HeldOutResult,
    by_version,
    conditions_path,
    held_out_table,
    read_held_out,
    results_path,
)
from vla_rl.evaluation.results import EpisodeResult, wilson_interval
from vla_rl.observe import RunDirectory

PACKAGED: Final = ("package", "wheels")
"""Sources of assets that are installed packages: hf-libero with assets in it, or the wheels."""

LEAST_STARTS: Final = 100


def compared(
    results: Sequence[HeldOutResult],
) -> tuple[int, list[EpisodeResult], list[EpisodeResult]]:
    """Return the last weight version, and the episodes of the first and of the last one from the
    starts that both have.

    Raises: ValueError if fewer than two versions were evaluated.
    """
    versions = by_version(results)
    if len(versions) < 2:
        raise ValueError(
            f"{len(versions)} weight versions were evaluated, expected the first and the last: the "
            "run has not ended, or had no held-out episodes (--held-out.init-states)"
        )
    first, last = versions[min(versions)], versions[max(versions)]
    both = {result.key for result in first} & {result.key for result in last}
    return (
        max(versions),
        [result for result in first if result.key in both],
        [result for result in last if result.key in both],
    )


def figures_of(run: RunDirectory) -> dict[str, Any]:
    """Return the figures of a run. Raises: ValueError if it was not evaluated twice; OSError."""
    version, before, after = compared(read_held_out(results_path(run)))
    conditions, about = _json(conditions_path(run)), _json(run.path / "about.json")
    source = about.get("assets", "unknown")
    rates = [100 * sum(each.is_success for each in found) / len(found) for found in (before, after)]
    return {
        "before": round(rates[0], 2),
        "after": round(rates[1], 2),
        "points_gained": round(rates[1] - rates[0], 2),
        "starts": len(after),
        "updates": version,
        "minutes": _minutes(run),
        "assets": "package" if source in PACKAGED else source,
        "quality": conditions.get("quality"),
        "physics": conditions.get("physics"),
        "seed": _json(run.config).get("run", {}).get("seed"),
    }


def _minutes(run: RunDirectory) -> float | None:
    """Return the minutes from the start to the last held-out episode; None for a resumed run."""
    if (run.path / "versions-2.json").exists():
        return None
    began = datetime.datetime.fromisoformat(_json(run.path / "versions.json")["started_at"])
    return round((results_path(run).stat().st_mtime - began.timestamp()) / 60, 2)


def _json(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def main() -> int:
    """Print the table of the run, what its size allows to conclude, and the JSON line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="folder of a finished run, such as runs/<run>")
    try:
        run = RunDirectory.existing(parser.parse_args().run)
        figures = figures_of(run)
    except (VlaRlError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    Console().print(held_out_table(read_held_out(results_path(run))))
    if figures["starts"] < LEAST_STARTS:
        low, high = wilson_interval(figures["starts"] // 2, figures["starts"])
        print(
            f"{figures['starts']} held-out starts are few: each rate is known to within "
            f"{50 * (high - low):.0f} points; take at least {LEAST_STARTS} "
            "(--held-out.init-states)"
        )
    print_json_line(figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
