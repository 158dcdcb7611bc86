"""The page itself: what a run's folder holds, put into the template."""

import base64
import itertools
import logging
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import msgspec

from vla_rl.commands.report.charts import (
    Rows,
    failure_reward_chart,
    node_seconds,
    return_chart,
    success_chart,
    time_chart,
)
from vla_rl.evaluation.held_out import HeldOutResult, by_version, read_held_out, results_path
from vla_rl.evaluation.results import EpisodeResult, by_task, summary_of
from vla_rl.evaluation.strips import strip_path
from vla_rl.evaluation.validation import ValidationResult, read_validation, validation_path
from vla_rl.observe import RunDirectory, read_metrics
from vla_rl.observe.whole_file import write_whole

logger = logging.getLogger(__name__)

MAX_STRIPS = 3
"""Pairs of before and after that are shown."""


@dataclass(frozen=True)
class Comparison:
    """Held-out episodes of one task, or of all, by the first weights and by the last."""

    name: str
    before: str
    after: str
    gain: str


@dataclass(frozen=True)
class StripPair:
    """The same start, failed by the first weights and solved by the last."""

    title: str
    before: str
    after: str


def write_report(run: RunDirectory) -> Path:
    """Write `report.html` into the run's folder: one file that needs no other and no network.

    What the run did not leave (held-out episodes, updates) is named as missing. A damaged file about the run (versions,
    configuration, graph) is a warning; its text is shown as far as it can be read.

    Raises: ConfigError for a damaged line of held-out results; OSError if the page cannot be written.
    """
    rows = read_metrics(run.metrics) if run.metrics.exists() else []
    held_out = read_held_out(results_path(run))
    validation = read_validation(validation_path(run))
    versions = _json(run.path / "versions.json")
    template = jinja2.Environment(
        loader=jinja2.PackageLoader("vla_rl.commands.report", "."), autoescape=True, undefined=jinja2.StrictUndefined
    ).get_template("page.html.jinja")
    text = template.render(
        name=run.path.name,
        about=_json(run.path / "about.json"),
        command=_command(versions),
        versions={name: value for name, value in versions.items() if name not in ("command", "packages")},
        packages=versions.get("packages", {}),
        config=_text(run.config),
        num_updates=len(rows),
        is_success_known=not rows or any("rollout/success_rate" in row for row in rows),
        minutes=minutes_of(rows),
        charts=[
            ("Success", success_chart(rows, _points(held_out))),
            ("Return", return_chart(rows)),
            ("What failures earned", failure_reward_chart(rows)),
            ("Where the time went", time_chart(rows)),
        ],
        nodes=node_seconds(rows),
        comparisons=comparisons(held_out),
        num_left_out=num_left_out(held_out),
        validation=validation_rows(validation),
        how_to_evaluate=how_to_evaluate(_json(run.config)),
        strips=_strips(run, held_out),
        graph=_text(run.path / "graph.txt"),
    )
    path = run.path / "report.html"
    write_whole(path, text.encode())
    return path


def minutes_of(rows: Rows) -> float:
    """Minutes from the first update to the last, without what lay between a stop and a resume."""
    times = [(float(row.get("wall_time_s") or 0.0), row.get("time/update_s")) for row in rows]
    gaps = [(after - before, taken) for (before, _), (after, taken) in itertools.pairwise(times)]
    return sum(gap if taken is None else min(gap, taken) for gap, taken in gaps) / 60


def comparisons(held_out: list[HeldOutResult]) -> list[Comparison]:
    """One row a task and one for all, of the episodes that the first and the last weights played; empty without any."""
    first, last = _first_and_last(held_out)
    rows = [
        _comparison(task, [each for each in first if each.task == task], [each for each in last if each.task == task])
        for task in by_task(first)
    ]
    return [*rows, _comparison("all", first, last)] if rows else []


def _first_and_last(held_out: list[HeldOutResult]) -> tuple[list[EpisodeResult], list[EpisodeResult]]:
    """The same episodes of both: those that one of them has not played yet are left out."""
    versions = by_version(held_out)
    if len(versions) < 2:
        return [], []
    first, *_, last = versions.values()
    of_both = {result.key for result in first} & {result.key for result in last}
    return [each for each in first if each.key in of_both], [each for each in last if each.key in of_both]


def validation_rows(results: Sequence[ValidationResult]) -> list[tuple[str, float, float]]:
    """Each metric by the first and by the last weights that were validated; empty if only one version was."""
    if len(results) < 2:
        return []
    first, last = results[0].metrics, results[-1].metrics
    return [(name, first[name], last[name]) for name in first if name in last]


def how_to_evaluate(config: Mapping[str, Any]) -> str:
    """What makes a run of this configuration evaluate before and after: an option that its recipe has, or an argument."""
    if "held_out" in config:
        return "--held-out.init-states 40-49"
    if "num_validation" in config:
        return "--num-validation 64"
    return "train(..., judge=...) in Python"


def num_left_out(held_out: list[HeldOutResult]) -> int:
    """Episodes of the first weights that the last ones have not played, as where their judging was stopped."""
    played = by_version(held_out)
    return len(next(iter(played.values()))) - len(_first_and_last(held_out)[0]) if len(played) > 1 else 0


def _comparison(name: str, before: list[EpisodeResult], after: list[EpisodeResult]) -> Comparison:
    gain = 100 * (summary_of(after)["success_rate"] - summary_of(before)["success_rate"])
    return Comparison(name, _rate(before), _rate(after), f"{gain:+.0f} points")


def _rate(results: list[EpisodeResult]) -> str:
    found = summary_of(results)
    low, high = found["wilson_95"]
    return (
        f"{found['successes']} of {found['episodes']}: {100 * found['success_rate']:.0f} % "
        f"(95 %: {100 * low:.0f} to {100 * high:.0f})"
    )


def _points(held_out: list[HeldOutResult]) -> list[tuple[int, float, float, float]]:
    found = {version: summary_of(results) for version, results in by_version(held_out).items()}
    return [(version, each["success_rate"], *each["wilson_95"]) for version, each in found.items()]


def _strips(run: RunDirectory, held_out: list[HeldOutResult]) -> list[StripPair]:
    versions = by_version(held_out)
    if len(versions) < 2:
        return []
    first, last = min(versions), max(versions)
    solved = {result.key for result in versions[last] if result.is_success}
    pairs = []
    for result in versions[first]:
        if result.is_success or result.key not in solved:
            continue
        images = [strip_path(run, version, result.key) for version in (first, last)]
        if all(image.exists() for image in images):
            start = f"initial state {result.init_state_id}, scene seed {result.scene_seed}"
            title = f"{result.instruction} ({result.task}, {start})"
            pairs.append(StripPair(title, *(_data_url(image) for image in images)))
    return pairs[:MAX_STRIPS]


def _data_url(path: Path) -> str:
    return f"data:image/jpeg;base64,{base64.b64encode(path.read_bytes()).decode()}"


def _command(versions: dict[str, Any]) -> str:
    script, *arguments = versions.get("command") or [""]
    module = script.partition("vla_rl/recipes/")[2].removesuffix(".py")
    return shlex.join(["python", "-m", f"vla_rl.recipes.{module}", *arguments] if module else [script, *arguments])


def _json(path: Path) -> dict[str, Any]:
    """Read a JSON file; an empty dict, and a warning, if it is damaged."""
    if not path.exists():
        return {}
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, ValueError, RecursionError) as error:  # ValueError: no JSON, or bytes that are no text
        logger.warning("%s cannot be read, and the report does without it: %s", path, error)
        return {}


def _text(path: Path) -> str:
    """Read a text file; bytes that are no text become marks, with a warning."""
    data = path.read_bytes() if path.exists() else b""
    text = data.decode(errors="replace")
    if text.encode() != data:
        logger.warning("%s is not whole text in UTF-8; the report shows what can be read", path)
    return text
