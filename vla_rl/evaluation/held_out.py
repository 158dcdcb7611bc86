"""What a run is judged by: greedy episodes from starts that training never sees, before its first update and after its last.

held_out.jsonl in the run's folder: one line an episode, with the weight version that played it; a resumed run goes on with
it, under the conditions in held_out_conditions.json.
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
from vla_rl.rollout import PolicyEngine, embodied_agent
from vla_rl.types import EnvPool, EpisodeSpec, Trajectory


class HeldOutResult(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One episode, and who played it."""

    weight_version: int
    result: EpisodeResult


class Judge(Protocol):
    """Evaluates a policy in the middle of a run, while nothing else plays."""

    async def __call__(self, run: RunDirectory, pool: EnvPool, engine: Any) -> None:
        """Play, and leave the results in `run`."""
        ...

    def check(self, run: RunDirectory) -> None:
        """Raises: ConfigError if the results in `run` are of other conditions, before a run goes on."""
        ...

    def leave_later(self, run: RunDirectory, version: int) -> None:
        """Set aside the results of weights after `version`: the run goes on from there, and makes others.

        Raises: OSError.
        """
        ...


class HeldOutJudge:
    """Plays the same episodes whenever it is asked, each once a weight version.

    Args:
        episodes: what to play.
        film: given each trajectory and its weight version, in the order in which they end; a place for videos.
        assets: which of LIBERO's assets were found, where the episodes leave it to whoever plays them.
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
        """What the results depend on."""
        self._outlet: Outlet[bytes] | None = None
        self._film_failures = FailureStreak("film strips of held-out episodes", "that episode has none")

    def check(self, run: RunDirectory) -> None:
        """Raises: ConfigError where the results in `run` were played under other conditions."""
        refuse_other_conditions(conditions_path(run), self.conditions)

    @property
    def num_failed_films(self) -> int:
        """Episodes whose `film` could not be written; their results stand."""
        return self._film_failures.num_failed

    def leave_later(self, run: RunDirectory, version: int) -> None:
        """Set aside the results of weights that a run, which goes on from `version`, makes anew. Raises: OSError."""
        set_aside_lines(results_path(run), lambda line: _is_of(line, version))

    async def __call__(self, run: RunDirectory, pool: EnvPool, engine: PolicyEngine) -> None:
        """Play what this weight version has not played yet, and print how it went beside the earlier versions.

        A result that cannot be written is reported and tried again with the next; on a resume those that are not on disk
        are played again. Raises: ConfigError if the earlier versions were played under other conditions.
        """
        note_conditions_if_possible(conditions_path(run), self.conditions, results_path(run))
        version, path = engine.weight_version, results_path(run)
        results = read_held_out(path)
        played = {line.result.key for line in results if line.weight_version == version}
        missing = [episode for episode in self._episodes if key_of(episode) not in played]
        console, outlet = Console(), self._outlet_of(path)
        with Progress(console=console) as progress:
            bar = progress.add_task(f"held-out episodes, weights {version}", total=len(self._episodes))
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
        """One for all times that this judge is asked: a result that found no room is written the next time."""
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
    except (ValueError, RecursionError):  # which reading the file reports
        return True


def conditions_path(run: RunDirectory) -> Path:
    """Where it stands how a run's held-out episodes are played."""
    return run.path / "held_out_conditions.json"


def results_path(run: RunDirectory) -> Path:
    """Where a run's held-out results stand."""
    return run.path / "held_out.jsonl"


def read_held_out(path: Path) -> list[HeldOutResult]:
    """All results so far; a last line that was cut off by a kill is left out. Raises: ConfigError for damaged lines."""
    results = []
    for number, line in enumerate(whole_lines(path).splitlines(), start=1):
        try:
            results.append(msgspec.json.decode(line, type=HeldOutResult))
        except (ValueError, RecursionError) as error:  # no JSON of a result, or bytes that are no text
            raise ConfigError(
                f"{path}, line {number} is not a result: {error}; remove that line, and its episode is played again"
            ) from error
    return results


def by_version(results: Sequence[HeldOutResult]) -> dict[int, list[EpisodeResult]]:
    """The episodes of each weight version, from the first to the last."""
    versions = sorted({line.weight_version for line in results})
    return {version: [line.result for line in results if line.weight_version == version] for version in versions}


def held_out_table(results: Sequence[HeldOutResult]) -> Table:
    """One row a task, and one for all; for each weight version its success rate and the interval that holds 95 %."""
    versions = by_version(results)
    table = Table("task", title="Held-out episodes solved")
    for version in versions:
        table.add_column(f"weights {version}", justify="right")
    for task in by_task([line.result for line in results]):
        table.add_row(task, *(_rate([each for each in played if each.task == task]) for played in versions.values()))
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
