"""The curve of a run's held-out episodes: a point for each weight version that has run all of them.

A version that still lacks episodes has no point: short episodes end first, and are successes more
often.
"""

import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
from rich.table import Table

from vla_rl.errors import ConfigError
from vla_rl.evaluation.held_out_book import HeldOutRow, RowFormat
from vla_rl.evaluation.results import Z_95, Key, wilson_interval
from vla_rl.observe import RunDirectory
from vla_rl.observe.whole_file import write_whole

CURVE_FILE: Final = "held_out_curve.json"


class Mean(NamedTuple):
    """A mean over episodes, with its 95 % interval."""

    episodes: int
    mean: float
    low: float
    high: float


class CurvePoint(msgspec.Struct, frozen=True):
    """The results of one weight version over all starts."""

    weights: int
    all: Mean
    tasks: dict[str, Mean]
    """Results by task, if there are several."""


class Curve(msgspec.Struct, frozen=True):
    """All points of a run, by weight version."""

    measure: str
    """`success_rate` or `score`."""

    points: tuple[CurvePoint, ...] = ()
    skipped: tuple[int, ...] = ()
    """Versions that were due while an earlier one was evaluated, and left out for a newer one."""

    @property
    def best(self) -> CurvePoint | None:
        """The point with the highest mean; the earliest of several."""
        return max(self.points, key=lambda point: (point.all.mean, -point.weights), default=None)

    @property
    def num_without_gain(self) -> int:
        """Number of evaluations since the best one."""
        best = self.best
        return 0 if best is None else sum(point.weights > best.weights for point in self.points)

    def metrics_of(self, point: CurvePoint) -> dict[str, float]:
        """Return a point as metrics by path."""
        parts = {"": point.all, **{f"/{task}": mean for task, mean in point.tasks.items()}}
        return {
            f"held_out/{name}{part}": value
            for part, mean in parts.items()
            for name, value in (
                (self.measure, mean.mean),
                ("ci_low", mean.low),
                ("ci_high", mean.high),
                ("episodes", float(mean.episodes)),
            )
        }

    def in_words(self, point: CurvePoint) -> str:
        """Return a point's result with its interval."""
        mean = point.all
        if self.measure != "success_rate":
            half = (mean.high - mean.low) / 2
            return f"{self.measure} {mean.mean:.3f} ± {half:.3f} over {mean.episodes} starts"
        solved = round(mean.mean * mean.episodes)
        return (
            f"{solved} of {mean.episodes} starts solved = {100 * mean.mean:.0f} % "
            f"(95 %: {100 * mean.low:.0f} to {100 * mean.high:.0f})"
        )

    def final_line(self, version: int) -> str:
        """Return the results of the last weights, `version`, and of the best, in one line."""
        best = self.best
        if best is None:
            return "held out: no weights were evaluated on all starts"
        newest = self.points[-1]
        final = f"held out: final weights {version}"
        if newest.weights == version:
            text = f"{final}: {self.in_words(newest)}"
        else:
            newest_text = f"weights {newest.weights}: {self.in_words(newest)}"
            text = f"{final} were not evaluated; newest evaluated: {newest_text}"
        same = best.weights == newest.weights
        best_text = "the same" if same else f"weights {best.weights}: {self.in_words(best)}"
        return f"{text}; best: {best_text}"


def curve_of(
    rows: Iterable[HeldOutRow],
    keys: Sequence[Key],
    format: RowFormat,
    skipped: Iterable[int] = (),
) -> Curve:
    """Return the curve of the episodes `keys`; rows of other episodes do not count."""
    by_version: dict[int, dict[Key, float]] = {}
    for row in rows:
        by_version.setdefault(row.weight_version, {})[row.key] = row.value
    points = []
    for version in sorted(by_version):
        values = by_version[version]
        if keys and all(key in values for key in keys):
            points.append(_point(version, {key: values[key] for key in keys}, format))
    return Curve(format.measure, tuple(points), tuple(sorted(set(skipped))))


def curve_path(run: RunDirectory) -> Path:
    """Return the file with a run's curve."""
    return run.path / CURVE_FILE


def write_curve(run: RunDirectory, curve: Curve) -> None:
    """Write the curve into the run's folder. Raises: OSError."""
    write_whole(curve_path(run), msgspec.json.format(msgspec.json.encode(curve)) + b"\n")


def read_curve(run: RunDirectory) -> Curve | None:
    """Read the curve of a run; None if it has none.

    Raises: ConfigError if the file is damaged.
    """
    path = curve_path(run)
    try:
        return msgspec.json.decode(path.read_bytes(), type=Curve)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{path} cannot be read: {error}; remove it, and a resume of the run writes it again"
        ) from error


def curve_table(curve: Curve) -> Table:
    """Make a table with a row for each weight version, and a column for each task."""
    tasks = list(curve.points[-1].tasks) if curve.points else []
    table = Table("weights", "all starts", *tasks, title="Held-out starts during training")
    for point in curve.points:
        mark = " (best)" if point is curve.best else ""
        cells = [f"{point.tasks[task].mean:.2f}" for task in tasks if task in point.tasks]
        table.add_row(f"{point.weights}{mark}", curve.in_words(point), *cells)
    return table


def _point(version: int, values: dict[Key, float], format: RowFormat) -> CurvePoint:
    tasks: dict[str, list[float]] = {}
    for (task, _, _), value in values.items():
        tasks.setdefault(task, []).append(value)
    by_task = {task: _mean(found, format) for task, found in tasks.items()}
    return CurvePoint(
        version, _mean(list(values.values()), format), by_task if len(tasks) > 1 else {}
    )


def _mean(values: Sequence[float], format: RowFormat) -> Mean:
    num, mean = len(values), statistics.fmean(values)
    if format.measure == "success_rate":
        return Mean(num, mean, *wilson_interval(round(sum(values)), num))
    half = Z_95 * statistics.stdev(values) / math.sqrt(num) if num > 1 else 0.0
    return Mean(num, mean, mean - half, mean + half)
