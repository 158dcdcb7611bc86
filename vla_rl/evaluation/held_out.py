"""Evaluation within a training run: greedy episodes from held-out starts, before the first update
and after the last.

held_out.jsonl in the run's folder has one line per episode, with its weight version. A resumed run
continues the file, under the conditions in held_out_conditions.json.
"""

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from vla_rl.actors.waits import note_progress
from vla_rl.errors import ConfigError
from vla_rl.evaluation.conditions import (
    conditions_of_play,
    note_conditions_if_possible,
    refuse_other_conditions,
)
from vla_rl.evaluation.libero import key_of
from vla_rl.evaluation.playing import play_each, within_range
from vla_rl.evaluation.results import (
    EpisodeResult,
    by_task,
    line_outlet,
    result_of,
    summary_of,
    whole_lines,
)
from vla_rl.observe import RunDirectory
from vla_rl.observe.outlet import FailureStreak, Outlet
from vla_rl.observe.undone_lines import set_aside_lines
from vla_rl.rollout import ActionEngine, embodied_agent
from vla_rl.types import EnvPool, EpisodeSpec, Trajectory


class HeldOutResult(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The result of one episode, and the weight version that acted."""

    weight_version: int
    result: EpisodeResult


class Judge(Protocol):
    """Evaluates a policy in the middle of a run, while no other episode runs."""

    async def __call__(self, run: RunDirectory, pool: EnvPool, engine: Any) -> None:
        """Run the episodes and store the results in `run`."""
        ...

    def check(self, run: RunDirectory) -> None:
        """Check the results in `run` before it is resumed.

        Raises: ConfigError if their conditions differ.
        """
        ...

    def leave_later(self, run: RunDirectory, version: int) -> None:
        """Set aside the results of weights after `version`, because the run resumes there and makes
        new ones.

        Raises: OSError.
        """
        ...


class HeldOutJudge:
    """Runs the same episodes at each call, each once per weight version.

    Args:
        episodes: episodes to run.
        film: called with each trajectory and its weight version, in the order in which they end, to
            make videos.
        assets: the assets of LIBERO that were found, if the episodes do not name them.
    """

    def __init__(
        self,
        episodes: Sequence[EpisodeSpec],
        film: Callable[[RunDirectory, int, Trajectory], Awaitable[None]] | None = None,
        *,
        assets: str = "",
    ) -> None:
        self._episodes, self._film = tuple(episodes), film
        self.conditions = conditions_of_play(episodes) | ({"assets": assets} if assets else {})
        """Conditions that the results depend on."""
        self._outlet: Outlet[bytes] | None = None
        self._film_failures = FailureStreak(
            "film strips of held-out episodes", "that episode has none"
        )

    def check(self, run: RunDirectory) -> None:
        """Check the results in `run`. Raises: ConfigError if their conditions differ."""
        refuse_other_conditions(conditions_path(run), self.conditions)

    @property
    def num_failed_films(self) -> int:
        """Number of episodes whose `film` could not be written; their results are kept."""
        return self._film_failures.num_failed

    def leave_later(self, run: RunDirectory, version: int) -> None:
        """Set aside the results of weights after `version`, which a resumed run makes again.

        Raises: OSError.
        """
        set_aside_lines(results_path(run), lambda line: _is_of(line, version))

    async def __call__(self, run: RunDirectory, pool: EnvPool, engine: ActionEngine) -> None:
        """Run the episodes that this weight version lacks, and print its results beside those of
        earlier versions.

        A result that cannot be written is reported and written with the next one; a resume runs the
        episodes whose results are not on disk again. Raises: ConfigError if the earlier versions
        ran under other conditions.
        """
        note_conditions_if_possible(conditions_path(run), self.conditions, results_path(run))
        version, path = engine.weight_version, results_path(run)
        results = read_held_out(path)
        played = {line.result.key for line in results if line.weight_version == version}
        missing = [episode for episode in self._episodes if key_of(episode) not in played]
        console, outlet = Console(), self._outlet_of(path)
        with Progress(console=console) as progress:
            bar = progress.add_task(
                f"held-out episodes, weights {version}", total=len(self._episodes)
            )
            progress.advance(bar, len(self._episodes) - len(missing))

            async def done(trajectory: Trajectory) -> None:
                line = HeldOutResult(weight_version=version, result=result_of(trajectory))
                results.append(line)
                outlet.put(f"episode {len(results)}", msgspec.json.encode(line) + b"\n")
                await self._make_film(run, version, trajectory)
                progress.advance(bar)
                note_progress("held-out episodes")

            await play_each(pool, engine, within_range(embodied_agent), missing, done)
        console.print(held_out_table(results))

    def _outlet_of(self, path: Path) -> Outlet[bytes]:
        """Return the outlet, the same for all calls, so that a result that found no room is written
        by the next call.
        """
        if self._outlet is None:
            self._outlet = line_outlet(path)
        return self._outlet

    async def _make_film(self, run: RunDirectory, version: int, trajectory: Trajectory) -> None:
        if self._film is None:
            return
        try:
            await self._film(run, version, trajectory)
        except (OSError, ValueError) as error:
            self._film_failures.failed(str(result_of(trajectory).key), error)
        else:
            self._film_failures.worked()


def _is_of(line: bytes, last: int) -> bool:
    try:
        return msgspec.json.decode(line, type=HeldOutResult).weight_version <= last
    except (ValueError, RecursionError):  # reported when the file is read
        return True


def conditions_path(run: RunDirectory) -> Path:
    """Return the file with the conditions of a run's held-out episodes."""
    return run.path / "held_out_conditions.json"


def results_path(run: RunDirectory) -> Path:
    """Return the file with a run's held-out results."""
    return run.path / "held_out.jsonl"


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


def _rate(results: Sequence[EpisodeResult]) -> str:
    if not results:
        return "-"
    found = summary_of(results)
    low, high = found["wilson_95"]
    return (
        f"{found['successes']}/{found['episodes']} = {100 * found['success_rate']:.0f} % "
        f"({100 * low:.0f} to {100 * high:.0f})"
    )
