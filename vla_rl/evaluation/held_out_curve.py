"""The curve of a run's held-out episodes: a point for each weight version that has run all of them.

There are two sets of starts. One chooses the best checkpoint; the other, which had no part in the
choice, is reported. A version that still lacks episodes has no point: short episodes end first, and
are successes more often.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

import msgspec
from rich.table import Table

from vla_rl.errors import ConfigError
from vla_rl.evaluation.record_file import RecordFile
from vla_rl.evaluation.records import EpisodeRecord, Key, Measure, episode_key, record_key
from vla_rl.evaluation.tables import Mean, compute_mean, make_table
from vla_rl.reporting import RunDirectory
from vla_rl.types import EpisodeSpec
from vla_rl.util.atomic_files import replace_file

CURVE_FILE: Final = "held_out_curve.json"


class CurvePoint(msgspec.Struct, frozen=True):
    """The results of one weight version over all starts of a set.

    Example:
        CurvePoint(weights=20, all=Mean(100, 0.84, 0.756, 0.899), tasks={})
    """

    weights: int
    all: Mean
    tasks: dict[str, Mean]
    """Results by task, if there are several."""


class Best(msgspec.Struct, frozen=True):
    """The checkpoint that the starts to choose by chose.

    Example:
        Best(weights=20, report=Mean(100, 0.81, ...), chose=Mean(100, 0.84, 0.756, 0.899))
    """

    weights: int
    report: Mean | None
    """Its results on the starts that are reported, which had no part in the choice; None if it has
    not run them."""

    chose: Mean
    """Its results on the starts that chose it: too high, because it is the highest of several."""


class Curve(msgspec.Struct, frozen=True):
    """All points of a run, by weight version, on both sets of starts."""

    measure: str
    """`success_rate` or `score`."""

    best: Best | None = None
    report: tuple[CurvePoint, ...] = ()
    """Results on the starts that are reported: of the first weights, the best and the last."""

    chose: tuple[CurvePoint, ...] = ()
    """Results on the starts that choose the best checkpoint, of all evaluated weights."""

    skipped: tuple[int, ...] = ()
    """Versions that were due while an earlier one was evaluated, and left out for a newer one."""

    has_one_set: bool = False
    """Whether the run is from before there were two sets: the starts that are reported also chose."""

    def reported(self, version: int) -> CurvePoint | None:
        """Return the results of a version on the starts that are reported, if it has run them."""
        return next((point for point in self.report if point.weights == version), None)

    def metrics_of(self, point: CurvePoint, prefix: str = "held_out") -> dict[str, float]:
        """Return a point as metrics by path."""
        parts = {"": point.all, **{f"/{task}": mean for task, mean in point.tasks.items()}}
        return {
            f"{prefix}/{name}{part}": value
            for part, mean in parts.items()
            for name, value in (
                (self.measure, mean.mean),
                ("ci_low", mean.low),
                ("ci_high", mean.high),
                ("episodes", float(mean.episodes)),
            )
        }

    def describe(self, mean: Mean) -> str:
        """Return a result with its interval."""
        if self.measure != "success_rate":
            return (
                f"{self.measure} {mean.mean:.3f} (95 %: {mean.low:.3f} to {mean.high:.3f}) over "
                f"{mean.episodes} starts"
            )
        solved = round(mean.mean * mean.episodes)
        return (
            f"{solved} of {mean.episodes} starts solved = {100 * mean.mean:.0f} % "
            f"(95 %: {100 * mean.low:.0f} to {100 * mean.high:.0f})"
        )

    def final_line(self, version: int) -> str:
        """Return the results of the last weights, `version`, and of the best, in one line: first
        those on the starts that are reported.
        """
        if self.best is None and not self.report:
            return "held out: no weights were evaluated on all starts"
        if self.has_one_set:
            return self._final_line_of_one_set(version)
        final = self.reported(version)
        text = f"held out: final weights {version}"
        text += f": {self.describe(final.all)}" if final else " are not reported yet"
        first = self.reported(0)
        if first is not None and version != 0:
            text += f"; weights 0: {self.describe(first.all)}"
        if self.best is not None and self.best.weights == version:
            text += f"; best: the same, {self._chose(self.best)}"
        elif self.best is not None:
            report = self.best.report
            found = self.describe(report) if report else "not reported yet"
            text += f"; best: weights {self.best.weights}: {found}, {self._chose(self.best)}"
        return text

    def _chose(self, best: Best) -> str:
        rate = best.chose.mean
        value = f"{100 * rate:.0f} %" if self.measure == "success_rate" else f"{rate:.3f}"
        return f"chose with {value} of {best.chose.episodes} other starts"

    def _final_line_of_one_set(self, version: int) -> str:
        best, newest = self.best, self.chose[-1]
        assert best is not None
        text = f"held out: final weights {version}"
        if newest.weights == version:
            text += f": {self.describe(newest.all)}"
        else:
            text += f" were not evaluated; newest evaluated: weights {newest.weights}: "
            text += self.describe(newest.all)
        best_text = f"weights {best.weights}: {self.describe(best.chose)}"
        return f"{text}; best, by the starts that chose it: {best_text}"

    def describe_rank(self, point: CurvePoint) -> str:
        """Describe how a point compares with the best one so far, as the end of a sentence."""
        assert self.best is not None
        if self.best.weights == point.weights:
            return "; the best so far"
        return f"; the best are weights {self.best.weights} with {self.best.chose.mean:.3g}"


def curve_points(
    records: Iterable[EpisodeRecord], keys: Sequence[Key], measure: Measure
) -> tuple[CurvePoint, ...]:
    """Return the points of the starts `keys`, by weight version; records of other starts do not
    count.
    """
    of_weights: dict[int, dict[Key, float]] = {}
    for record in records:
        of_weights.setdefault(record.weights, {})[record_key(record, measure)] = record.value
    points = []
    for weights in sorted(of_weights):
        values = of_weights[weights]
        if keys and all(key in values for key in keys):
            points.append(_point(weights, {key: values[key] for key in keys}, measure))
    return tuple(points)


class StartSet:
    """A set of starts, the file of its results, and its points of the curve."""

    def __init__(self, name: str, episodes: Sequence[EpisodeSpec], file: RecordFile) -> None:
        self.name, self.episodes, self.file = name, episodes, file

    @property
    def points(self) -> tuple[CurvePoint, ...]:
        """The results of all versions that have run all episodes."""
        measure = self.file.measure
        keys = [episode_key(episode, measure) for episode in self.episodes]
        return curve_points(self.file.records, keys, measure)

    def missing(self, version: int) -> list[EpisodeSpec]:
        """Return the episodes that a version has not run yet."""
        return self.file.list_missing(self.episodes, weights=version)


def choose(points: Iterable[CurvePoint]) -> CurvePoint | None:
    """Return the point with the highest mean; the earliest of several."""
    return max(points, key=lambda point: (point.all.mean, -point.weights), default=None)


def make_curve(
    measure: str,
    chose: Sequence[CurvePoint],
    report: Sequence[CurvePoint] = (),
    skipped: Iterable[int] = (),
    *,
    has_one_set: bool = False,
) -> Curve:
    """Return the curve of a run.

    Args:
        measure: that of the points.
        chose: points on the starts that choose.
        report: points on the starts that are reported; those of other weights than the first, the
            best and the newest are left out.
        skipped: versions that were not evaluated.
        has_one_set: whether `chose` is on the starts that are reported.
    """
    best = choose(chose)
    # others were run by an earlier part of the run, when another version was the best: reporting
    # them too would invite a choice by the starts that are to have none
    versions = {0, best.weights if best else 0, max((each.weights for each in report), default=0)}
    shown = tuple(each for each in report if each.weights in versions)
    found = {each.weights: each.all for each in shown}
    return Curve(
        measure,
        None if best is None else Best(best.weights, found.get(best.weights), best.all),
        shown,
        tuple(chose),
        tuple(sorted(set(skipped))),
        has_one_set,
    )


def curve_path(run: RunDirectory) -> Path:
    """Return the file with a run's curve."""
    return run.path / CURVE_FILE


def write_curve(run: RunDirectory, curve: Curve) -> None:
    """Write the curve into the run's folder. Raises: OSError."""
    replace_file(curve_path(run), msgspec.json.format(msgspec.json.encode(curve)) + b"\n")


def read_curve(run: RunDirectory) -> Curve | None:
    """Read the curve of a run; None if it has none.

    Raises: ConfigError if the file is damaged.
    """
    path = curve_path(run)
    try:
        text = path.read_bytes()
        one_set = msgspec.json.decode(text, type=_CurveOfOneSet)
        if one_set.points is not None:
            return make_curve(
                one_set.measure, one_set.points, skipped=one_set.skipped, has_one_set=True
            )
        return msgspec.json.decode(text, type=Curve)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{path} cannot be read: {error}; remove it, and a resume of the run writes it again"
        ) from error


def curve_tables(curve: Curve) -> list[Table]:
    """Make a table of the starts that are reported, and one of those that chose: a row for each
    weight version, and a column for each task.
    """
    best = None if curve.best is None else curve.best.weights
    of_chose = "Starts that chose the best checkpoint, during training"
    tables = [
        _table("Held-out starts", curve, curve.report, "report", best),
        _table(of_chose, curve, curve.chose, "chose", best),
    ]
    return [table for table in tables if table.row_count]


def _table(
    title: str, curve: Curve, points: Sequence[CurvePoint], set_name: str, best: int | None
) -> Table:
    rows = {
        f"{point.weights}{' (best)' if point.weights == best else ''}": {
            set_name: curve.describe(point.all),
            **{task: f"{mean.mean:.2f}" for task, mean in point.tasks.items()},
        }
        for point in points
    }
    return make_table(title, "weights", rows)


class _CurveOfOneSet(msgspec.Struct, frozen=True):
    """The file of a run from before there were two sets, or of any other without `points`."""

    measure: str
    points: tuple[CurvePoint, ...] | None = None
    skipped: tuple[int, ...] = ()


def _point(weights: int, values: dict[Key, float], measure: Measure) -> CurvePoint:
    tasks: dict[str, list[float]] = {}
    for (task, *_), value in values.items():
        tasks.setdefault(task, []).append(value)
    # one row of a task says nothing that the row of all does not
    by_task = {task: compute_mean(found, measure) for task, found in tasks.items()}
    everything = compute_mean(list(values.values()), measure)
    return CurvePoint(weights, everything, by_task if len(tasks) > 1 else {})
