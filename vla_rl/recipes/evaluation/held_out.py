"""What a run is judged by: greedy episodes from starts that training never sees, before its first update and after its last.

held_out.jsonl in the run's folder: one line an episode, with the weight version that played it; a resumed run goes on with
it, under the conditions in held_out_conditions.json.
"""

import logging
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from vla_rl.actors.waits import note_progress
from vla_rl.errors import ConfigError
from vla_rl.observe import RunDirectory
from vla_rl.recipes.evaluation.conditions import conditions_of_play, note_conditions, refuse_other_conditions
from vla_rl.recipes.evaluation.libero import key_of
from vla_rl.recipes.evaluation.playing import play_each, within_range
from vla_rl.recipes.evaluation.results import EpisodeResult, by_task, result_of, summary_of, whole_lines
from vla_rl.rollout import PolicyEngine, embodied_agent
from vla_rl.types import EnvPool, EpisodeSpec, Trajectory

logger = logging.getLogger(__name__)


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
        """Raises: ConfigError where the results in `run` are of other conditions, before a run goes on."""
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
        self.num_failed_films = 0
        """Episodes whose `film` could not be written; their results stand."""

    def check(self, run: RunDirectory) -> None:
        """Raises: ConfigError where the results in `run` were played under other conditions."""
        refuse_other_conditions(conditions_path(run), self.conditions)

    async def __call__(self, run: RunDirectory, pool: EnvPool, engine: PolicyEngine) -> None:
        """Play what this weight version has not played yet, and print how it went beside the earlier versions.

        Raises: ConfigError where those were played under other conditions.
        """
        note_conditions(conditions_path(run), self.conditions, results_path(run))
        version, path = engine.weight_version, results_path(run)
        played = {line.result.key for line in read_held_out(path) if line.weight_version == version}
        missing = [episode for episode in self._episodes if key_of(episode) not in played]
        console = Console()
        with path.open("ab") as file, Progress(console=console) as progress:
            file.truncate(len(whole_lines(path)))
            bar = progress.add_task(f"held-out episodes, weights {version}", total=len(self._episodes))
            progress.advance(bar, len(self._episodes) - len(missing))

            async def done(trajectory: Trajectory) -> None:
                line = HeldOutResult(weight_version=version, result=result_of(trajectory))
                file.write(msgspec.json.encode(line) + b"\n")
                file.flush()
                if self._film is not None:
                    try:
                        await self._film(run, version, trajectory)
                    except (OSError, ValueError) as error:
                        self.num_failed_films += 1
                        logger.warning(
                            "no pictures of %s: %s; %d failed so far", line.result.key, error, self.num_failed_films
                        )
                progress.advance(bar)
                note_progress("held-out episodes")

            await play_each(pool, engine, within_range(embodied_agent), missing, done)
        console.print(held_out_table(read_held_out(path)))


def conditions_path(run: RunDirectory) -> Path:
    """Where it stands how a run's held-out episodes are played."""
    return run.path / "held_out_conditions.json"


def results_path(run: RunDirectory) -> Path:
    """Where a run's held-out results stand."""
    return run.path / "held_out.jsonl"


def read_held_out(path: Path) -> list[HeldOutResult]:
    """All results so far; a last line that was cut off by a kill is left out. Raises: ConfigError for other lines."""
    results = []
    for number, line in enumerate(whole_lines(path).splitlines(), start=1):
        try:
            results.append(msgspec.json.decode(line, type=HeldOutResult))
        except msgspec.DecodeError as error:
            raise ConfigError(f"{path}, line {number} is not a result: {error}") from error
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
