"""An evaluation from its command line to its tables: plan, run what is missing, write results.

`eval_libero` and `eval_metaworld` are this with their configurations.
"""

import asyncio
import dataclasses
import logging
import shlex
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Final

import msgspec
from rich.console import Console
from rich.progress import Progress
from rich.syntax import Syntax

from vla_rl.actors import Runtime
from vla_rl.cli.command_line import Command, Launch, convert, read_table
from vla_rl.cli.dry_run import distinct_envs, open_each
from vla_rl.cli.policy_source import PolicySource, open_source
from vla_rl.env_workers import SimulatorConfig, SimulatorPool
from vla_rl.errors import ConfigError
from vla_rl.evaluation import run_each
from vla_rl.evaluation.conditions import record_conditions, refuse_other_conditions
from vla_rl.evaluation.config import (
    EvalConfig,
    describe_conditions,
    evaluation_conditions,
    one_of_each_kind,
    planned_episodes,
    print_plan,
    refuse_other_config,
    require_goal_files,
)
from vla_rl.evaluation.record_file import RecordFile
from vla_rl.evaluation.records import EPISODES, EpisodeRecord, make_record
from vla_rl.evaluation.suites import LIBERO
from vla_rl.evaluation.tables import print_tables, table_title, write_results
from vla_rl.reporting import RunDirectory
from vla_rl.reporting.record_files import FailureReporter
from vla_rl.reporting.run_directory import require_writable
from vla_rl.reporting.videos import write_video
from vla_rl.run.recording import check_recording, owned_recording, record_agent, run_digest
from vla_rl.run.terminal import StopSignal
from vla_rl.types import EpisodeSpec, Trajectory
from vla_rl.util.tasks import run_in_thread
from vla_rl.util.values import plain_console

if TYPE_CHECKING:
    pass


VIDEO_FRAMES_PER_S: Final = 5.0
"""One frame for each decision."""


class ResultRecorder:
    """Stores the record of each episode, then makes a video if one is wanted.

    One episode at a time.
    """

    def __init__(self, config: EvalConfig, file: RecordFile, videos: Path) -> None:
        self._config, self._file, self._videos = config, file, videos
        # in turn: whether a video is wanted depends on how many of its task are there already
        self._turn = asyncio.Lock()
        self._failures = FailureReporter(f"writing videos to {videos}", "that episode has none")

    @property
    def num_failed_videos(self) -> int:
        """Videos that could not be written."""
        return self._failures.num_failed

    async def keep(self, trajectory: Trajectory) -> None:
        """Store a record on disk, then make its video.

        A video that cannot be made is reported and counted.
        """
        record = make_record(trajectory)
        async with self._turn:
            # the record before the video: an episode may have taken minutes, and a disk that is
            # full for a video may have room for a line
            await self._file.append_record(record)
            try:
                await run_in_thread(
                    _write_wanted_video, self._config, trajectory, record, self._videos
                )
            except (OSError, ValueError) as error:
                self._failures.failed(str(record.episode_key), error)
            else:
                self._failures.worked()


def _write_wanted_video(
    config: EvalConfig, trajectory: Trajectory, record: EpisodeRecord, folder: Path
) -> None:
    """Make a video if one is wanted and the task has too few of them."""
    outcome = "success" if record.is_success else "failure"
    wanted = {
        "none": (),
        "failures": ("failure",),
        "successes": ("success",),
        "both": ("failure", "success"),
    }
    kind = f"{record.suite}-{record.task_id}_{outcome}"
    if (
        outcome in wanted[config.videos]
        and len(list(folder.glob(f"{kind}_init-*.mp4"))) < config.videos_per_task
    ):
        path = folder / f"{kind}_init-{record.start}_scene-{record.seed}.mp4"
        write_video(path, trajectory, "image", VIDEO_FRAMES_PER_S)


logger = logging.getLogger(__name__)

MOST_PREPARED = 100
"""Scenes that are built once and shared by all simulators; enough for all of LIBERO-90.
LIBERO-plus's suites have 2500 tasks; scenes beyond this number are built by the simulator that runs
them, so that memory is bounded."""


@dataclasses.dataclass(frozen=True)
class EvalLaunch(Launch):
    """Options of an evaluation besides its configuration."""

    recorded_before: ClassVar[Mapping[str, Any]] = MappingProxyType({"scenes": "same"})

    resume: Path | None = None
    """Continue the evaluation in this folder: run the episodes that are still missing."""


async def main(command: Command[EvalLaunch, EvalConfig]) -> int:
    """Print the plan, or run the episodes and print the tables."""
    config, console = command.config, plain_console()
    folder = command.launch.resume
    if folder is not None:
        refuse_other_config(config, _read_config(folder, type(config)), folder)
    episodes = planned_episodes(config)
    if command.launch.dry_run:
        await _show_plan(config, episodes, folder, console)
        return 0
    source = open_source(config)
    conditions = evaluation_conditions(config, await source.read_digest())
    # loaded before the folder is made: a checkpoint that cannot be read leaves no empty run behind
    if folder is None:
        await source.load()
    run = (
        RunDirectory.resume(folder)
        if folder
        else RunDirectory.create(Path(config.root), config.name, config)
    )
    with run.owned(), owned_recording(config.record_to):
        return await _evaluate(config, episodes, source, run, conditions, console)


async def _evaluate(
    config: EvalConfig,
    episodes: list[EpisodeSpec],
    source: PolicySource,
    run: RunDirectory,
    conditions: dict[str, Any],
    console: Console,
) -> int:
    """Run what is missing and print the tables; return the exit status."""
    _note_conditions(run, conditions)
    with_assets = f"; assets: {conditions['assets']}" if "assets" in conditions else ""
    # paths are printed without rich, which breaks long ones and drops what stands in brackets
    print(
        f"evaluation {run.path}: {len(episodes)} episodes of {config.checkpoint_folder}{with_assets}",
        flush=True,
    )
    warning = source.describe_other_images(conditions.get("assets", ""))
    if warning is not None:
        print(warning, flush=True)
    with (
        _open_records(run.path) as file,
        StopSignal("losing the running episodes") as stop,
    ):
        missing = file.list_missing(episodes)
        if missing:
            print(await source.load(), flush=True)
            await stop.unless_asked(
                _run_episodes(source, config, conditions, missing, file, run, len(episodes))
            )
        records, num_waiting = file.records, file.num_waiting
        num_missing = len(file.list_missing(episodes))
    is_written = num_waiting == 0
    if records:
        sizes = {"num_planned": len(episodes), "num_missing": num_missing}
        title = table_title(config.checkpoint_folder, conditions, **sizes)
        conditions_in_words = describe_conditions(config) + config.real_time.in_words
        print_tables(records, title, conditions_in_words, console)
        latencies = source.latencies()
        if latencies is not None and missing:
            console.print(latencies)
        is_written &= await asyncio.to_thread(
            _try_to_write_results, run.path / "results.json", conditions, records, sizes
        )
    print(f"everything of this evaluation is in {run.path}")
    if stop.is_asked or not is_written:
        print(f"continue with --resume {shlex.quote(str(run.path))}")
    return stop.exit_status or int(not is_written)


async def _show_plan(
    config: EvalConfig, episodes: list[EpisodeSpec], folder: Path | None, console: Console
) -> None:
    """Print the plan, and read everything that the evaluation would read."""
    console.print(
        Syntax(msgspec.json.format(msgspec.json.encode(config), indent=2).decode(), "json")
    )
    num_done = 0
    if folder is not None:
        with _open_records(folder) as file:
            num_done = len(episodes) - len(file.list_missing(episodes))
    source = open_source(config)
    print_plan(config, episodes, num_done, config.num_envs, source.weight_bytes, console)
    await _rehearse(config, source, episodes, folder)
    console.print("everything that the evaluation would read was found")


async def _rehearse(
    config: EvalConfig, source: PolicySource, episodes: list[EpisodeSpec], folder: Path | None
) -> None:
    """Read everything that the evaluation would read. Raises: what the evaluation would raise."""
    conditions = evaluation_conditions(config, await source.read_digest())
    if folder is None:
        require_writable(Path(config.root))
    else:
        refuse_other_conditions(folder / "conditions.json", conditions)
    envs = distinct_envs(episode.env for episode in episodes)
    await asyncio.to_thread(check_recording, config.record_to, envs)
    await source.load()
    opened = envs
    if config.benchmark is LIBERO:  # LIBERO-plus has thousands of environments, in suites of 2,500
        await asyncio.to_thread(require_goal_files, episodes)
        opened = one_of_each_kind(episodes) if len(envs) > MOST_PREPARED else envs
    if len(opened) < len(envs):
        print(
            f"{len(envs)} environments: one of each suite and kind of change is opened "
            f"({len(opened)}); of the others, the files of their tasks were found",
            flush=True,
        )
    await open_each(opened, SimulatorConfig(rss_limit_mb=4000))


def _note_conditions(run: RunDirectory, conditions: dict[str, Any]) -> None:
    try:
        record_conditions(run.path / "conditions.json", conditions)
    except OSError as error:
        raise ConfigError(
            f"the evaluation {run.path} cannot be written: {error}; make room, or choose another "
            "folder (--root)"
        ) from error


def _try_to_write_results(
    path: Path, conditions: dict[str, Any], records: list[EpisodeRecord], sizes: dict[str, int]
) -> bool:
    """Write `results.json`; if that fails, log a warning and return False.

    A resume writes it without new episodes.
    """
    try:
        write_results(path, conditions, records, **sizes)
    except OSError as error:
        logger.warning("%s could not be written: %s", path, error)
        return False
    return True


async def _run_episodes(
    source: PolicySource,
    config: EvalConfig,
    conditions: dict[str, Any],
    missing: list[EpisodeSpec],
    file: RecordFile,
    run: RunDirectory,
    num_planned: int,
) -> None:
    envs = [episode.env for episode in missing]
    simulators = SimulatorConfig(num_envs=min(config.num_envs, len(missing)), rss_limit_mb=4000)
    specs = list({str(episode.env): episode.env for episode in missing}.values())[:MOST_PREPARED]
    with Progress(console=plain_console()) as progress:
        bar = progress.add_task(
            "evaluating", total=num_planned, completed=num_planned - len(missing)
        )
        recorder = ResultRecorder(config, file, run.videos)

        async def done(trajectory: Trajectory) -> None:
            await recorder.keep(trajectory)
            successes = sum(record.is_success for record in file.records)
            progress.update(
                bar, advance=1, description=f"{successes} of {len(file.records)} succeeded"
            )

        async with (
            Runtime(config.name) as runtime,
            SimulatorPool(runtime, simulators, specs=specs) as pool,
            # a batch has room for every simulator, so that none waits for a second one
            source.acting(max_batch=pool.num_envs) as (engine, acting),
        ):
            agent = await record_agent(acting, config.record_to, envs, run_digest(conditions))
            await run_each(pool, engine, agent, missing, done)


def _open_records(folder: Path) -> RecordFile:
    return RecordFile(folder / EPISODES.file, EPISODES.measure, each_once=True)


def _read_config(folder: Path, config_type: type[EvalConfig]) -> EvalConfig:
    """Read the configuration of an evaluation, with the values of fields that are younger."""
    path = folder / "config.json"
    younger = {
        name: value
        for name, value in EvalLaunch.recorded_before.items()
        if name in config_type.__struct_fields__
    }
    return convert({**younger, **read_table(path, config_type)}, config_type, str(path))
