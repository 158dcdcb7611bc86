"""Evaluation within a training run: the same episodes for each weight version that is evaluated.

They run before the first update and after the last, and during training if the schedule says so. Of two
sets of starts without one in common, one chooses the best checkpoint during training, and the other is
reported. The file of each set in the run's folder has one record per episode, with its weight version. A
resumed run continues the files, under the conditions in held_out_conditions.json.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
from rich.progress import Progress

from vla_rl.errors import ConfigError
from vla_rl.evaluation.conditions import (
    episode_conditions,
    first_choosing_records,
    first_records,
    refuse_other_conditions,
    try_to_record_conditions,
)
from vla_rl.evaluation.held_out_schedule import HeldOutSchedule, refuse_shared_starts, split_in_two
from vla_rl.evaluation.record_file import RecordFile, read_records, set_later_aside
from vla_rl.evaluation.records import (
    SUCCESSES,
    EpisodeRecord,
    RecordFormat,
    choosing_format,
    episode_key,
    make_record,
)
from vla_rl.evaluation.run_episodes import embodied_agent_within_range, run_each, run_each_on_hosts
from vla_rl.evaluation.tables import weights_table
from vla_rl.models.families import require_token_means
from vla_rl.reporting import RunDirectory
from vla_rl.reporting.record_files import FailureReporter
from vla_rl.rollout import AnyEngine, EpisodeRunner
from vla_rl.types import Agent, EnvPool, EpisodeSpec, Trajectory
from vla_rl.util.atomic_files import replace_file
from vla_rl.util.stalls import note_progress
from vla_rl.util.values import plain_console

CONDITIONS_FILE: Final = "held_out_conditions.json"

ContactSheetWriter = Callable[[RunDirectory, int, Trajectory], Awaitable[None]]
"""Writes a contact sheet of a trajectory of a weight version, in the order in which episodes end."""

Done = Callable[[Trajectory], Awaitable[None]]
"""Called with each trajectory that ends."""


class HeldOutEvaluator:
    """Runs the same episodes for each weight version that it evaluates, each once.

    Args:
        episodes: episodes to run and report.
        contact_sheet: writes a contact sheet of each.
        choose: other episodes, which choose the best checkpoint if the schedule has `every`. None:
            half of `episodes` choose, and the other half is reported.
        assets: the assets of LIBERO that were found, if the episodes do not name them.
        schedule: evaluations during the run; with `every`, the run evaluates its checkpoints in a
            process of their own and calls this evaluator for no other version.
        format: the file of the records and their measure.
        policy_digest: digest of the checkpoint that the run starts from, for
            `schedule.first_results_of`.
        agent: runs one episode, in this process. None: the embodied agent, on any host.
        conditions: what the records depend on. None: what the episodes have in common.

    Raises: ConfigError if an episode is in both sets, or if the results that
    `schedule.first_results_of` names do not fit.
    """

    conditions_file = CONDITIONS_FILE
    """Name of the file with the conditions, in the folder of the run."""

    what = "held-out episodes"
    """Name of the episodes, for the progress of the run."""

    def __init__(
        self,
        episodes: Sequence[EpisodeSpec],
        contact_sheet: ContactSheetWriter | None = None,
        *,
        choose: Sequence[EpisodeSpec] | None = None,
        assets: str = "",
        schedule: HeldOutSchedule | None = None,
        format: RecordFormat = SUCCESSES,
        policy_digest: str = "",
        agent: Agent | None = None,
        conditions: Mapping[str, Any] | None = None,
    ) -> None:
        self.schedule = schedule or HeldOutSchedule()
        self.one_set = tuple(episodes)
        """Episodes that choose and are reported in a run from before there were two sets."""
        if self.schedule.every is None:
            choose = ()
        elif choose is None:
            episodes, choose = split_in_two(episodes)
        self.episodes, self.choose = tuple(episodes), tuple(choose)
        self.contact_sheet, self._agent = contact_sheet, agent
        self.format, self.choose_format = format, choosing_format(format)
        refuse_shared_starts(self.episodes, self.choose, format.measure)
        self.conditions = dict(
            conditions
            if conditions is not None
            else episode_conditions([*self.one_set, *self.choose])
            | ({"assets": assets} if assets else {})
        )
        """Conditions that the records depend on."""
        self._first_records: dict[str, list[EpisodeRecord]] = {}
        if (source := self.schedule.first_results_of) is not None:
            folder = Path(source)
            self._first_records = {
                format.file: first_records(
                    folder, format, self.episodes, self.conditions, policy_digest
                ),
                self.choose_format.file: first_choosing_records(
                    folder, self.choose_format, self.choose
                ),
            }
        self._files: dict[Path, RecordFile] = {}
        self._sheet_failures = FailureReporter(
            "contact sheets of held-out episodes", "that episode has none"
        )

    def require_means(self, model: object) -> None:
        """Raise ConfigError if an episode acts by the means of tokens and the policy has none."""
        if any(each.sampling.by_mean for each in (*self.one_set, *self.choose)):
            require_token_means(model, "held_out.by_mean")

    @property
    def runs_on_hosts(self) -> bool:
        """Whether other hosts can run the episodes: they have the embodied agent."""
        return self._agent is None

    @property
    def num_failed_sheets(self) -> int:
        """Number of episodes whose contact sheet could not be written; their records are kept."""
        return self._sheet_failures.num_failed

    def check_records(self, run: RunDirectory) -> None:
        """Check that the records in `run` are of these conditions and, if scored, of these starts.

        Raises: ConfigError if they are not.
        """
        refuse_other_conditions(run.path / self.conditions_file, self.conditions)
        # a rate counts whatever starts there are; scores are compared start by start
        if self.format.measure != "score":
            return
        for format, episodes in ((self.format, self.one_set), (self.choose_format, self.choose)):
            starts = {episode_key(each, "score")[1] for each in episodes}
            path = run.path / format.file
            strange = {record.start for record in read_records(path)} - starts
            # without a schedule, the starts that chose before are left alone
            if strange and episodes:
                raise ConfigError(
                    f"{path} has results of starts {sorted(strange)[:8]}, which are not held out in "
                    "this configuration; resume with the first one's"
                )

    def set_later_aside(self, run: RunDirectory, weights: int) -> None:
        """Set aside the records of weights after these, which a resumed run makes again.

        Raises: OSError.
        """
        # both files: the starts that choose were run for the later weights too
        for format in (self.format, self.choose_format):
            set_later_aside(run.path / format.file, weights)
        self._files.clear()

    def open_report(self, run: RunDirectory) -> RecordFile:
        """Return the records in `run` on the starts that are reported, after recording or checking
        their conditions.

        Raises: ConfigError if earlier records are of other conditions, or damaged; OSError if those
        of another run cannot be written.
        """
        return self._open(run, self.format)

    def open_choosing(self, run: RunDirectory) -> RecordFile:
        """Return the records in `run` on the starts that choose. Raises: as `open_report`."""
        return self._open(run, self.choose_format)

    def _open(self, run: RunDirectory, format: RecordFormat) -> RecordFile:
        path = run.path / format.file
        try_to_record_conditions(run.path / self.conditions_file, self.conditions, path)
        if path not in self._files:
            records = self._first_records.get(format.file)
            # a run that is resumed has these records already; a second copy would be a duplicate
            # key
            if records and not path.exists():
                lines = [msgspec.json.encode(record) + b"\n" for record in records]
                replace_file(path, b"".join(lines))
                print(
                    f"the {len(records)} held-out results of the first weights in {path.name} are "
                    f"those of {self.schedule.first_results_of}",
                    flush=True,
                )
            # one file for all calls, so that a record that found no room is written by the next
            self._files[path] = RecordFile(path, format.measure)
        return self._files[path]

    async def __call__(self, run: RunDirectory, pool: EnvPool, engine: AnyEngine) -> None:
        """Run the episodes that this weight version lacks, and print its results with those of
        earlier versions.

        A record that cannot be written is reported and written with the next one; a resume runs the
        episodes whose records are not on disk again. Raises: ConfigError if the earlier versions
        ran under other conditions.
        """
        agent = self._agent or embodied_agent_within_range

        async def run_locally(missing: Sequence[EpisodeSpec], done: Done) -> None:
            await run_each(pool, engine, agent, missing, done)

        await self._evaluate(run, engine.weight_version, run_locally)

    async def evaluate_on_hosts(self, run: RunDirectory, runner: EpisodeRunner) -> None:
        """Do the same with the episodes on other hosts. Raises: as a call."""

        async def run_on_hosts(missing: Sequence[EpisodeSpec], done: Done) -> None:
            await run_each_on_hosts(runner, missing, done)

        await self._evaluate(run, runner.weight_version, run_on_hosts)

    async def _evaluate(
        self,
        run: RunDirectory,
        weights: int,
        run_episodes: Callable[[Sequence[EpisodeSpec], Done], Awaitable[None]],
    ) -> None:
        file = self.open_report(run)
        missing = file.list_missing(self.episodes, weights=weights)
        with Progress(console=plain_console()) as progress:
            bar = progress.add_task(f"{self.what}, weights {weights}", total=len(self.episodes))
            progress.advance(bar, len(self.episodes) - len(missing))

            async def done(trajectory: Trajectory) -> None:
                # the record first: a contact sheet that fails costs an image, and must not cost a
                # result
                await file.append_record(
                    make_record(trajectory, self.format.measure, weights=weights)
                )
                await self._write_contact_sheet(run, weights, trajectory)
                progress.advance(bar)
                note_progress(self.what)

            await run_episodes(missing, done)
        self.print_results(file, weights, num_new=len(missing))

    def print_results(self, file: RecordFile, weights: int, *, num_new: int) -> None:
        """Print the results so far, after `num_new` episodes were run for the newest weights."""
        plain_console().print(weights_table(file.records, self.format.measure), highlight=False)

    async def _write_contact_sheet(
        self, run: RunDirectory, weights: int, trajectory: Trajectory
    ) -> None:
        if self.contact_sheet is None:
            return
        try:
            await self.contact_sheet(run, weights, trajectory)
        except (OSError, ValueError) as error:
            key = episode_key(trajectory.episode, self.format.measure)
            self._sheet_failures.failed(str(key), error)
        else:
            self._sheet_failures.worked()


def conditions_path(run: RunDirectory) -> Path:
    """Return the file with the conditions of a run's held-out episodes."""
    return run.path / CONDITIONS_FILE
