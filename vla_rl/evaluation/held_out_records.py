"""The results of held-out episodes of one run: a file with a line for each, the same in memory, tables of them.

The file has results of several weight versions. An episode's identity is its key, and each version
has at most one line for a key. Episodes that succeed or fail are in held_out.jsonl. Those of an
environment that grades itself are in held_out_scores.jsonl: the weight version, the start, and all
that the environment put into `info["score"]`.
"""

import asyncio
import json
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
from rich.console import RenderableType
from rich.table import Table

from vla_rl.errors import ConfigError
from vla_rl.evaluation.results import (
    EpisodeResult,
    Key,
    complete_lines,
    episode_result,
    group_by_task,
    line_writer,
    summarise_results,
)
from vla_rl.evaluation.suites import episode_key
from vla_rl.reporting import RunDirectory
from vla_rl.reporting.record_files import set_aside_lines
from vla_rl.types import EpisodeSpec, Trajectory


class HeldOutRow(NamedTuple):
    """One line: an episode, the weights that acted, and what it was worth."""

    weight_version: int
    key: Key
    value: float
    """1 for a success and 0 for a failure, or the episode's score."""


class RowFormat(NamedTuple):
    """The format of a run's held-out results."""

    file: str
    """Name of the file in the run's folder."""

    measure: str
    """Name of the mean of `value`: `success_rate`, or `score`."""

    line_of: Callable[[int, Trajectory], bytes]
    """Returns the line of a trajectory by a weight version; a function at the top of a module, so
    that another process can import it."""

    row_in: Callable[[bytes], HeldOutRow]
    """Reads a line. Raises: ValueError, RecursionError."""

    key_of: Callable[[EpisodeSpec], Key]
    """Returns the key that the line of an episode will have."""

    table_of: Callable[[Sequence[bytes]], RenderableType]
    """Returns a table of lines, by weight version."""


def choosing_format(format: RowFormat) -> RowFormat:
    """Return the format of the results on the starts that choose: a file of their own."""
    name = Path(format.file)
    return format._replace(file=f"{name.stem}_choose{name.suffix}")


class HeldOutRecords:
    """Reads the results of a run and adds to them; a line is on disk when `add` returns.

    A line that finds no room on a full disk waits in memory, and is written with the next one.

    Raises: ConfigError for damaged lines.
    """

    def __init__(self, path: Path, format: RowFormat) -> None:
        self.format = format
        self.lines = complete_lines(path).splitlines()
        self.rows = [
            _read_row(line, format, f"{path}, line {number}")
            for number, line in enumerate(self.lines, start=1)
        ]
        self._outlet = line_writer(path)
        self._turn = asyncio.Lock()

    def missing(self, version: int, episodes: Iterable[EpisodeSpec]) -> list[EpisodeSpec]:
        """Return the episodes that a weight version has not run yet."""
        run = self.keys_of(version)
        return [episode for episode in episodes if self.format.key_of(episode) not in run]

    def keys_of(self, version: int) -> Collection[Key]:
        """Return the keys of all episodes that a weight version has run."""
        return {row.key for row in self.rows if row.weight_version == version}

    async def add(self, line: bytes) -> None:
        """Append the line of an episode."""
        self.lines.append(line)
        self.rows.append(self.format.row_in(line))
        async with self._turn:  # the outlet is for one thread at a time
            await asyncio.to_thread(
                self._outlet.put, f"episode {len(self.rows)}", line.rstrip(b"\n") + b"\n"
            )


def set_aside_rows(path: Path, format: RowFormat, last: int) -> None:
    """Move the lines of weight versions after `last` to a file beside `path`.

    A damaged line stays, and is reported when the file is read.

    Raises: OSError.
    """

    def is_kept(line: bytes) -> bool:
        try:
            return format.row_in(line).weight_version <= last
        except (ValueError, RecursionError):
            return True

    set_aside_lines(path, is_kept)


def _read_row(line: bytes, format: RowFormat, where: str) -> HeldOutRow:
    try:
        return format.row_in(line)
    except (ValueError, RecursionError) as error:  # invalid JSON or UTF-8, or no result
        raise ConfigError(
            f"{where} is not a result: {error}; remove that line, and its episode is run again"
        ) from error


class HeldOutResult(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The result of one episode, and the weight version that acted."""

    weight_version: int
    result: EpisodeResult


def success_line(weight_version: int, trajectory: Trajectory) -> bytes:
    """Return the line of an episode in held_out.jsonl."""
    result = HeldOutResult(weight_version=weight_version, result=episode_result(trajectory))
    return msgspec.json.encode(result)


def _success_row(line: bytes) -> HeldOutRow:
    found = msgspec.json.decode(line, type=HeldOutResult)
    return HeldOutRow(found.weight_version, found.result.key, float(found.result.is_success))


def results_path(run: RunDirectory) -> Path:
    """Return the file with a run's held-out results."""
    return run.path / SUCCESSES.file


def read_held_out(path: Path) -> list[HeldOutResult]:
    """Read all results so far, without a last line that a kill cut off.

    Raises: ConfigError for damaged lines.
    """
    results = []
    for number, line in enumerate(complete_lines(path).splitlines(), start=1):
        try:
            results.append(msgspec.json.decode(line, type=HeldOutResult))
        except (ValueError, RecursionError) as error:  # invalid JSON or UTF-8, or no result
            raise ConfigError(
                f"{path}, line {number} is not a result: {error}; remove that line, and its "
                "episode is run again"
            ) from error
    return results


def group_by_version(results: Sequence[HeldOutResult]) -> dict[int, list[EpisodeResult]]:
    """Group the episodes by weight version, from the first to the last."""
    versions = sorted({line.weight_version for line in results})
    return {
        version: [line.result for line in results if line.weight_version == version]
        for version in versions
    }


def held_out_table(results: Sequence[HeldOutResult]) -> Table:
    """Make a table with one row per task and one for all: each weight version's success rate and
    its 95 % interval.
    """
    versions = group_by_version(results)
    table = Table("task", title="Held-out episodes solved")
    for version in versions:
        table.add_column(f"weights {version}", justify="right")
    for task in group_by_task([line.result for line in results]):
        table.add_row(
            task,
            *(
                _format_rate([each for each in results if each.task == task])
                for results in versions.values()
            ),
        )
    table.add_section()
    table.add_row("all", *(_format_rate(results) for results in versions.values()))
    return table


def _success_table(lines: Sequence[bytes]) -> Table:
    return held_out_table([msgspec.json.decode(line, type=HeldOutResult) for line in lines])


def _format_rate(results: Sequence[EpisodeResult]) -> str:
    if not results:
        return "-"
    found = summarise_results(results)
    low, high = found["wilson_95"]
    return (
        f"{found['successes']}/{found['episodes']} = {100 * found['success_rate']:.0f} % "
        f"({100 * low:.0f} to {100 * high:.0f})"
    )


SUCCESSES: Final = RowFormat(
    file="held_out.jsonl",
    measure="success_rate",
    line_of=success_line,
    row_in=_success_row,
    key_of=episode_key,
    table_of=_success_table,
)
"""Success or failure of each episode."""


ScoreLine = dict[str, float]


def score_line(weight_version: int, trajectory: Trajectory) -> bytes:
    """Return the line of an episode in held_out_scores.jsonl.

    Raises: ConfigError if its environment did not grade it.
    """
    episode, score = trajectory.episode, trajectory.info.get("score")
    if not isinstance(score, dict):
        raise ConfigError(
            f"{episode.env.id} ended an episode without info['score'], expected a number for each "
            "part of its score"
        )
    start = episode.options["init_state_id"]
    return json.dumps({"weights": weight_version, "start": start, **score}).encode()


def _score_row(line: bytes) -> HeldOutRow:
    found = json.loads(line)
    try:
        return HeldOutRow(found["weights"], ("", found["start"], 0), float(found["total"]))
    except (KeyError, TypeError) as error:
        raise ValueError(f"expected weights, start and total, got {found!r}") from error


def _score_key(episode: EpisodeSpec) -> Key:
    return "", episode.options["init_state_id"], 0


def read_scores(path: Path) -> list[ScoreLine]:
    """Read all results so far, without a last line that a kill cut off."""
    return [json.loads(line) for line in complete_lines(path).splitlines()]


def _describe_scores(lines: Sequence[bytes]) -> str:
    rows = score_table([json.loads(line) for line in lines])
    return f"held-out scores, mean and 95 % interval:\n{rows}"


def score_table(lines: Sequence[ScoreLine]) -> str:
    """Return a row for each part of the score: its mean and 95 % interval by weight version."""
    rows = []
    for name, means in score_means(lines).items():
        cells = [f"weights {version}: {mean}" for version, mean in means.items()]
        rows.append(f"{name:32} {'   '.join(cells)}")
    return "\n".join(rows)


def score_means(lines: Sequence[ScoreLine]) -> dict[str, dict[int, str]]:
    """Return the mean and 95 % interval of each part of the score by weight version, total first."""
    found: dict[str, dict[int, list[Any]]] = defaultdict(lambda: defaultdict(list))
    for line in lines:
        for name in line.keys() - {"weights", "start"}:
            found[name][int(line["weights"])].append(line[name])
    return {
        name: {version: _format_mean(values) for version, values in found[name].items()}
        for name in sorted(found, key=lambda name: (name != "total", name))
    }


def _format_mean(values: Sequence[float]) -> str:
    half = 1.96 * float(np.std(values, ddof=1)) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return f"{float(np.mean(values)):.3f} ± {half:.3f} ({len(values)})"


SCORES: Final = RowFormat(
    file="held_out_scores.jsonl",
    measure="score",
    line_of=score_line,
    row_in=_score_row,
    key_of=_score_key,
    table_of=_describe_scores,
)
"""All parts of each episode's score; their `total` counts."""
