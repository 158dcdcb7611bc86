"""Held-out episodes that succeed or fail: their lines in held_out.jsonl, and tables of them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
from rich.table import Table

from vla_rl.errors import ConfigError
from vla_rl.evaluation.held_out_book import HeldOutRow, RowFormat
from vla_rl.evaluation.libero import key_of
from vla_rl.evaluation.results import EpisodeResult, by_task, result_of, summary_of, whole_lines
from vla_rl.reporting import RunDirectory
from vla_rl.types import Trajectory


class HeldOutResult(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The result of one episode, and the weight version that acted."""

    weight_version: int
    result: EpisodeResult


def line_of(weight_version: int, trajectory: Trajectory) -> bytes:
    """Return the line of an episode in held_out.jsonl."""
    result = HeldOutResult(weight_version=weight_version, result=result_of(trajectory))
    return msgspec.json.encode(result)


def _row_in(line: bytes) -> HeldOutRow:
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
    for number, line in enumerate(whole_lines(path).splitlines(), start=1):
        try:
            results.append(msgspec.json.decode(line, type=HeldOutResult))
        except (ValueError, RecursionError) as error:  # invalid JSON or UTF-8, or no result
            raise ConfigError(
                f"{path}, line {number} is not a result: {error}; remove that line, and its "
                "episode is run again"
            ) from error
    return results


def by_version(results: Sequence[HeldOutResult]) -> dict[int, list[EpisodeResult]]:
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
    versions = by_version(results)
    table = Table("task", title="Held-out episodes solved")
    for version in versions:
        table.add_column(f"weights {version}", justify="right")
    for task in by_task([line.result for line in results]):
        table.add_row(
            task,
            *(
                _rate([each for each in played if each.task == task])
                for played in versions.values()
            ),
        )
    table.add_section()
    table.add_row("all", *(_rate(played) for played in versions.values()))
    return table


def _table_of(lines: Sequence[bytes]) -> Table:
    return held_out_table([msgspec.json.decode(line, type=HeldOutResult) for line in lines])


def _rate(results: Sequence[EpisodeResult]) -> str:
    if not results:
        return "-"
    found = summary_of(results)
    low, high = found["wilson_95"]
    return (
        f"{found['successes']}/{found['episodes']} = {100 * found['success_rate']:.0f} % "
        f"({100 * low:.0f} to {100 * high:.0f})"
    )


SUCCESSES: Final = RowFormat(
    file="held_out.jsonl",
    measure="success_rate",
    line_of=line_of,
    row_in=_row_in,
    key_of=key_of,
    table_of=_table_of,
)
"""Success or failure of each episode."""
