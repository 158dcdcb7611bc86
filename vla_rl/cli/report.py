"""The report of a run, one page: training writes it at its end, `vla-rl report RUN` writes it again.

config, versions, about ─┐
metrics.jsonl ───────────┼─► charts (SVG) ─► report.html.jinja ─► report.html, which needs no other file
held_out.jsonl, strips/ ─┘
"""

import argparse
import base64
import itertools
import logging
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import msgspec

from vla_rl.cli.report_charts import (
    Rows,
    failure_reward_chart,
    held_out_chart,
    node_seconds,
    return_chart,
    success_chart,
    time_chart,
    value_chart,
)
from vla_rl.errors import ConfigError, VlaRlError
from vla_rl.evaluation.contact_sheets import contact_sheet_path, drive_pairs
from vla_rl.evaluation.held_out_curve import Curve, read_curve
from vla_rl.evaluation.record_file import read_records
from vla_rl.evaluation.records import (
    SCORES,
    SUCCESSES,
    EpisodeRecord,
    group_by_task,
    group_by_weights,
)
from vla_rl.evaluation.tables import Mean, compute_mean, format_mean, part_means
from vla_rl.evaluation.validation import read_validation, validation_path
from vla_rl.reporting import RunDirectory, read_metrics
from vla_rl.reporting.videos import list_transcripts
from vla_rl.run.terminal import lasting_output
from vla_rl.util.atomic_files import replace_file

logger = logging.getLogger(__name__)

MAX_PAIRS = 3
"""Maximum number of pairs of contact sheets, before and after training, and of transcripts that are shown."""


@dataclass(frozen=True)
class Comparison:
    """Held-out episodes of one task, or of all, by the first weights, the best and the last."""

    name: str
    before: str
    after: str
    gain: str
    best: str = ""
    """Empty if no weights were chosen, or the last ones were."""


@dataclass(frozen=True)
class SheetPair:
    """Contact sheets of one start by the first weights and by the last."""

    title: str
    before: str
    after: str


@dataclass(frozen=True)
class ScoreRow:
    """One part of the held-out score by the first weights, the best and the last."""

    name: str
    before: str
    after: str
    best: str = ""
    """Empty if no weights were chosen, or the last ones were."""


def write_report(run: RunDirectory) -> Path:
    """Write `report.html` into the run's folder: one file that needs no other file and no network.

    The page names data that the run lacks (held-out episodes, updates). A damaged file about the
    run (versions, configuration, graph) is logged as a warning, and its readable text is shown.

    Raises: ConfigError for damaged held-out results; OSError if the page cannot be
    written.
    """
    rows = read_metrics(run.metrics) if run.metrics.exists() else []
    held_out = read_records(run.path / SUCCESSES.file)
    curve = read_curve(run) or Curve("success_rate")
    validation = read_validation(validation_path(run))
    versions = _read_json(run.path / "versions.json")
    best = None if curve.has_one_set or curve.best is None else curve.best.weights
    # strict: a name that the page lacks would leave an empty spot, which nobody notices in a report
    template = jinja2.Environment(
        loader=jinja2.PackageLoader("vla_rl.cli", "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
    ).get_template("report.html.jinja")
    text = template.render(
        name=run.path.name,
        about=_read_json(run.path / "about.json"),
        command=_command(versions),
        versions={
            name: value for name, value in versions.items() if name not in ("command", "packages")
        },
        packages=versions.get("packages", {}),
        config=_read_text(run.config),
        num_updates=len(rows),
        is_success_known=not rows or any("rollout/success_rate" in row for row in rows),
        minutes=running_minutes(rows),
        charts=[
            ("Success", success_chart(rows, _curve_or_first_and_last(held_out, curve))),
            ("Held-out starts: report and choice", held_out_chart(curve)),
            ("Return", return_chart(rows)),
            ("What failures earned", failure_reward_chart(rows)),
            ("Values and measured returns", value_chart(rows)),
            ("Where the time went", time_chart(rows)),
        ],
        nodes=node_seconds(rows),
        comparisons=comparisons(held_out, best),
        curve=curve,
        best=best,
        num_left_out=count_left_out(held_out),
        scores=score_rows(read_records(run.path / SCORES.file), best),
        validation=validation_rows(validation),
        how_to_evaluate=how_to_evaluate(_read_json(run.config)),
        strips=_sheet_pairs(run, held_out),
        drives=_drive_pairs(run),
        transcripts=[
            (video.name, _data_url(video, "video/mp4"), text)
            for video, text in list_transcripts(run.videos)[:MAX_PAIRS]
        ],
        graph=_read_text(run.path / "graph.txt"),
    )
    path = run.path / "report.html"
    replace_file(path, text.encode())
    return path


def running_minutes(rows: Rows) -> float:
    """Return the minutes from the first update to the last, without pauses between a stop and a
    resume.
    """
    times = [(float(row.get("wall_time_s") or 0.0), row.get("time/update_s")) for row in rows]
    gaps = [
        (after - before, update_s) for (before, _), (after, update_s) in itertools.pairwise(times)
    ]
    # the gap before the first update of a resume holds the pause: it counts as long as the update
    return sum(gap if update_s is None else min(gap, update_s) for gap, update_s in gaps) / 60


def comparisons(held_out: list[EpisodeRecord], best: int | None = None) -> list[Comparison]:
    """Compare the episodes that the first and the last weights both ran: a row per task and one for
    all, or none. Those of the best weights stand next to them, if they ran all of these.
    """
    first, last = _first_and_last(held_out)
    chosen = _best_results(held_out, best, last)
    rows = [
        _comparison(
            task,
            *([each for each in found if each.task == task] for found in (first, last, chosen)),
        )
        for task in group_by_task(first)
    ]
    return [*rows, _comparison("all", first, last, chosen)] if rows else []


def _best_results(
    held_out: list[EpisodeRecord], best: int | None, last: list[EpisodeRecord]
) -> list[EpisodeRecord]:
    """Return the results of the best weights for the episodes of `last`; empty if they lack some,
    or are the last weights themselves.
    """
    versions = group_by_weights(held_out)
    if best not in versions or best == max(versions):
        return []
    keys = {result.episode_key for result in last}
    chosen = [each for each in versions[best] if each.episode_key in keys]
    return chosen if len(chosen) == len(last) else []


def _first_and_last(
    held_out: list[EpisodeRecord],
) -> tuple[list[EpisodeRecord], list[EpisodeRecord]]:
    """Return the results of the first and the last weights for the episodes that both have run."""
    versions = group_by_weights(held_out)
    if len(versions) < 2:
        return [], []
    first, *_, last = versions.values()
    # an evaluation that was stopped lacks episodes, and rates over different starts say nothing
    # about the weights
    of_both = {result.episode_key for result in first} & {result.episode_key for result in last}
    return [each for each in first if each.episode_key in of_both], [
        each for each in last if each.episode_key in of_both
    ]


def validation_rows(results: Mapping[int, dict[str, float]]) -> list[tuple[str, float, float]]:
    """Return each metric of the first and the last validated weights.

    Empty if only one version was validated.
    """
    if len(results) < 2:
        return []
    first, *_, last = results.values()
    return [(name, first[name], last[name]) for name in first if name in last]


def score_rows(records: Sequence[EpisodeRecord], best: int | None = None) -> list[ScoreRow]:
    """Return every part of the held-out score by the first, the best and the last weights, or
    nothing if only one version was evaluated.
    """
    versions = {record.weights for record in records}
    if len(versions) < 2:
        return []
    first, last = min(versions), max(versions)
    # no weights have this version, so that the column stays empty
    chosen = -1 if best is None or best == last else best
    rows = []
    for name, means in part_means(records).items():
        cells = {version: format_mean(mean, "score") for version, mean in means.items()}
        rows.append(
            ScoreRow(name, cells.get(first, "-"), cells.get(last, "-"), cells.get(chosen, ""))
        )
    return rows


def how_to_evaluate(config: Mapping[str, Any]) -> str:
    """Return the option or argument that makes a run of this configuration evaluate before and
    after.
    """
    held_out = config.get("held_out")
    if isinstance(held_out, dict):
        example = {"init_states": "--held-out.init-states 40-49", "scenes": "--held-out.scenes 500"}
        return next(
            (option for name, option in example.items() if name in held_out),
            "--held-out.starts 64",
        )
    if "num_validation" in config:
        return "--num-validation 64"
    return "train(..., evaluator=...) in Python"


def count_left_out(held_out: list[EpisodeRecord]) -> int:
    """Count the episodes that the first weights ran and the last did not, because their evaluation
    was stopped.
    """
    versions = group_by_weights(held_out)
    return (
        len(next(iter(versions.values()))) - len(_first_and_last(held_out)[0])
        if len(versions) > 1
        else 0
    )


def _comparison(
    name: str,
    before: list[EpisodeRecord],
    after: list[EpisodeRecord],
    chosen: list[EpisodeRecord],
) -> Comparison:
    gain = 100 * (_mean(after).mean - _mean(before).mean)
    best = _rate(chosen) if chosen else ""
    return Comparison(name, _rate(before), _rate(after), f"{gain:+.0f} points", best)


def _mean(records: list[EpisodeRecord]) -> Mean:
    return compute_mean([record.value for record in records], "success_rate")


def _rate(records: list[EpisodeRecord]) -> str:
    found = _mean(records)
    return (
        f"{round(found.mean * found.episodes)} of {found.episodes}: {100 * found.mean:.0f} % "
        f"(95 %: {100 * found.low:.0f} to {100 * found.high:.0f})"
    )


def _curve_or_first_and_last(
    held_out: list[EpisodeRecord], curve: Curve
) -> list[tuple[int, float, float, float]]:
    """Return the points of the curve on the starts that are reported; without one, those of the
    first and the last weights.
    """
    if curve.chose:
        reported = curve.chose if curve.has_one_set else curve.report
        points = reported if curve.measure == "success_rate" else ()
        return [(each.weights, each.all.mean, each.all.low, each.all.high) for each in points]
    found = {version: _mean(records) for version, records in group_by_weights(held_out).items()}
    return [(version, each.mean, each.low, each.high) for version, each in found.items()]


def _sheet_pairs(run: RunDirectory, held_out: list[EpisodeRecord]) -> list[SheetPair]:
    versions = group_by_weights(held_out)
    if len(versions) < 2:
        return []
    first, last = min(versions), max(versions)
    solved = {result.episode_key for result in versions[last] if result.is_success}
    pairs = []
    for result in versions[first]:
        if result.is_success or result.episode_key not in solved:
            continue
        images = [contact_sheet_path(run, version, result.episode_key) for version in (first, last)]
        if all(image.exists() for image in images):
            start = f"initial state {result.start}, scene seed {result.seed}"
            title = f"{result.instruction} ({result.task}, {start})"
            pairs.append(SheetPair(title, *(_data_url(image) for image in images)))
    return pairs[:MAX_PAIRS]


def _drive_pairs(run: RunDirectory) -> list[SheetPair]:
    return [
        SheetPair(
            f"{pair.kind}, held-out scene {pair.scene}: weights {pair.versions[0]} above, "
            f"{pair.versions[1]} below",
            _data_url(pair.before),
            _data_url(pair.after),
        )
        for pair in drive_pairs(run)
    ]


def _data_url(path: Path, kind: str = "image/jpeg") -> str:
    # inside the page, so that a report can be sent as one file
    return f"data:{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"


def _command(versions: dict[str, Any]) -> str:
    script, *arguments = versions.get("command") or [""]
    # as a person would start it again: of `python -m`, Python records the path of the module
    module = script.partition("vla_rl/recipes/")[2].removesuffix(".py")
    return shlex.join(
        ["python", "-m", f"vla_rl.recipes.{module}", *arguments] if module else [script, *arguments]
    )


def _read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file; an empty dict, and a warning, if it is damaged."""
    if not path.exists():
        return {}
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, ValueError, RecursionError) as error:  # ValueError: invalid JSON or UTF-8
        logger.warning("%s cannot be read, so the report leaves it out: %s", path, error)
        return {}


def _read_text(path: Path) -> str:
    """Read a text file; bytes that are not UTF-8 become replacement characters, with a warning."""
    data = path.read_bytes() if path.exists() else b""
    text = data.decode(errors="replace")
    if text.encode() != data:
        logger.warning("%s is not valid UTF-8; the report shows what can be read", path)
    return text


@lasting_output()
def main() -> int:
    """Write the report and print its path.

    Return the exit status: 1, with one line, if it cannot be written.
    """
    parser = argparse.ArgumentParser(
        description="Write the report of a finished or running training run again."
    )
    parser.add_argument("run", type=Path, help="the folder of a training run")
    folder: Path = parser.parse_args().run
    try:
        run = RunDirectory.existing(folder)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    try:
        print(write_report(run))
    except (VlaRlError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
