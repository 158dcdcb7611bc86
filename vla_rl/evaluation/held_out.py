"""Evaluation within a training run: greedy episodes from held-out starts, before the first update
and after the last, and beside training if its schedule says so.

Of two sets of starts without one in common, one chooses the best checkpoint beside training, and the
other is reported. The results file of each set in the run's folder has one line per episode, with
its weight version. A resumed run continues the files, under the conditions in
held_out_conditions.json.
"""

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from rich.progress import Progress

from vla_rl.errors import ConfigError
from vla_rl.evaluation.conditions import (
    episode_conditions,
    first_choosing_lines,
    first_lines,
    refuse_other_conditions,
    try_to_record_conditions,
)
from vla_rl.evaluation.held_out_records import (
    SCORES,
    SUCCESSES,
    HeldOutRecords,
    RowFormat,
    choosing_format,
    read_scores,
    set_aside_rows,
)
from vla_rl.evaluation.held_out_schedule import HeldOutSchedule, refuse_shared_starts, split_in_two
from vla_rl.evaluation.run_episodes import embodied_agent_within_range, run_each, run_each_on_hosts
from vla_rl.reporting import RunDirectory
from vla_rl.reporting.record_files import FailureReporter
from vla_rl.rollout import ActionEngine, EpisodeRunner
from vla_rl.types import EnvPool, EpisodeSpec, Trajectory
from vla_rl.util.atomic_files import replace_file
from vla_rl.util.stalls import note_progress
from vla_rl.util.values import plain_console

ContactSheetWriter = Callable[[RunDirectory, int, Trajectory], Awaitable[None]]
"""Makes a video of a trajectory of a weight version, in the order in which episodes end."""


Done = Callable[[Trajectory], Awaitable[None]]
"""Called with each trajectory that ends."""


class PolicyEvaluator(Protocol):
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


class HeldOutEvaluator:
    """Runs the same episodes for each weight version that it evaluates, each once.

    Args:
        episodes: episodes to run and report.
        film: makes videos, or film strips, of them.
        choose: other episodes, which choose the best checkpoint if the schedule has `every`. None:
            half of `episodes` choose, and the other half is reported.
        assets: the assets of LIBERO that were found, if the episodes do not name them.
        schedule: evaluations during the run; with `every`, the run evaluates its checkpoints in a
            process of their own and calls this evaluator for no other version.
        format: the file of the results and their measure.
        policy_digest: digest of the checkpoint that the run starts from, for
            `schedule.first_results_of`.

    Raises: ConfigError if an episode is in both sets, or if the results that
    `schedule.first_results_of` names do not fit.
    """

    def __init__(
        self,
        episodes: Sequence[EpisodeSpec],
        film: ContactSheetWriter | None = None,
        *,
        choose: Sequence[EpisodeSpec] | None = None,
        assets: str = "",
        schedule: HeldOutSchedule | None = None,
        format: RowFormat = SUCCESSES,
        policy_digest: str = "",
    ) -> None:
        self.schedule = schedule or HeldOutSchedule()
        self.one_set = tuple(episodes)
        """Episodes that choose and are reported in a run from before there were two sets."""
        if self.schedule.every is None:
            choose = ()
        elif choose is None:
            episodes, choose = split_in_two(episodes)
        self.episodes, self.choose, self.film = tuple(episodes), tuple(choose), film
        self.format, self.choose_format = format, choosing_format(format)
        refuse_shared_starts(self.episodes, self.choose, format)
        self.conditions = episode_conditions([*self.one_set, *self.choose]) | (
            {"assets": assets} if assets else {}
        )
        """Conditions that the results depend on."""
        self._first_lines: dict[str, list[bytes]] = {}
        if (source := self.schedule.first_results_of) is not None:
            folder = Path(source)
            self._first_lines = {
                format.file: first_lines(
                    folder, format, self.episodes, self.conditions, policy_digest
                ),
                self.choose_format.file: first_choosing_lines(
                    folder, self.choose_format, self.choose
                ),
            }
        self._books: dict[Path, HeldOutRecords] = {}
        self._film_failures = FailureReporter(
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
        for format in (self.format, self.choose_format):
            set_aside_rows(run.path / format.file, format, version)
        self._books.clear()

    def open(self, run: RunDirectory) -> HeldOutRecords:
        """Return the results in `run` on the starts that are reported, after noting or checking
        their conditions.

        Raises: ConfigError if earlier results are of other conditions, or damaged; OSError if those
        of another run cannot be written.
        """
        return self._open(run, self.format)

    def open_choosing(self, run: RunDirectory) -> HeldOutRecords:
        """Return the results in `run` on the starts that choose. Raises: as `open`."""
        return self._open(run, self.choose_format)

    def _open(self, run: RunDirectory, format: RowFormat) -> HeldOutRecords:
        path = run.path / format.file
        try_to_record_conditions(conditions_path(run), self.conditions, path)
        if path not in self._books:
            lines = self._first_lines.get(format.file)
            if lines and not path.exists():
                replace_file(path, b"".join(line + b"\n" for line in lines))
                print(
                    f"the {len(lines)} held-out results of the first weights in {path.name} are "
                    f"those of {self.schedule.first_results_of}",
                    flush=True,
                )
            # one book for all calls, so that a result that found no room is written by the next
            self._books[path] = HeldOutRecords(path, format)
        return self._books[path]

    async def __call__(self, run: RunDirectory, pool: EnvPool, engine: ActionEngine) -> None:
        """Run the episodes that this weight version lacks, and print its results beside those of
        earlier versions.

        A result that cannot be written is reported and written with the next one; a resume runs the
        episodes whose results are not on disk again. Raises: ConfigError if the earlier versions
        ran under other conditions.
        """

        async def run_missing(missing: Sequence[EpisodeSpec], done: Done) -> None:
            await run_each(pool, engine, embodied_agent_within_range, missing, done)

        await self._evaluate(run, engine.weight_version, run_missing)

    async def elsewhere(self, run: RunDirectory, runner: EpisodeRunner) -> None:
        """Do the same with the episodes on other hosts. Raises: as a call."""

        async def run_missing(missing: Sequence[EpisodeSpec], done: Done) -> None:
            await run_each_on_hosts(runner, missing, done)

        await self._evaluate(run, runner.weight_version, run_missing)

    async def _evaluate(
        self,
        run: RunDirectory,
        version: int,
        run_missing: Callable[[Sequence[EpisodeSpec], Done], Awaitable[None]],
    ) -> None:
        book = self.open(run)
        missing = book.missing(version, self.episodes)
        console = plain_console()
        with Progress(console=console) as progress:
            bar = progress.add_task(
                f"held-out episodes, weights {version}", total=len(self.episodes)
            )
            progress.advance(bar, len(self.episodes) - len(missing))

            async def done(trajectory: Trajectory) -> None:
                await book.add(self.format.line_of(version, trajectory))
                await self._make_film(run, version, trajectory)
                progress.advance(bar)
                note_progress("held-out episodes")

            await run_missing(missing, done)
        table = self.format.table_of(book.lines)
        console.print(table, soft_wrap=isinstance(table, str), highlight=False)

    async def _make_film(self, run: RunDirectory, version: int, trajectory: Trajectory) -> None:
        if self.film is None:
            return
        try:
            await self.film(run, version, trajectory)
        except (OSError, ValueError) as error:
            self._film_failures.failed(str(self.format.key_of(trajectory.episode)), error)
        else:
            self._film_failures.worked()


def conditions_path(run: RunDirectory) -> Path:
    """Return the file with the conditions of a run's held-out episodes."""
    return run.path / "held_out_conditions.json"


class ScoreEvaluator(HeldOutEvaluator):
    """A `HeldOutEvaluator` of episodes that are graded, with the mean of `total` as their measure.

    Args:
        episodes: episodes to run, told apart by their `init_state_id`.
        schedule: evaluations during the run.
        film: makes strips.
        policy_digest, choose: as those of `HeldOutEvaluator`.
    """

    def __init__(
        self,
        episodes: Sequence[EpisodeSpec],
        schedule: HeldOutSchedule | None = None,
        film: ContactSheetWriter | None = None,
        policy_digest: str = "",
        choose: Sequence[EpisodeSpec] | None = None,
    ) -> None:
        super().__init__(
            episodes,
            film,
            choose=choose,
            schedule=schedule,
            format=SCORES,
            policy_digest=policy_digest,
        )

    def check(self, run: RunDirectory) -> None:
        """Check that the results in `run` are of these episodes.

        Raises: ConfigError if they are not.
        """
        super().check(run)
        for format, episodes in (
            (self.format, self.one_set),
            (self.choose_format, self.choose),
        ):
            starts, path = {format.key_of(each)[1] for each in episodes}, run.path / format.file
            strange = {int(line["start"]) for line in read_scores(path)} - starts
            # without a schedule, the starts that chose before are left alone
            if strange and episodes:
                raise ConfigError(
                    f"{path} has results of starts {sorted(strange)[:8]}, which are not held out in "
                    "this configuration; resume with the first one's"
                )
