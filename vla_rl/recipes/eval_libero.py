"""Evaluate a checkpoint on LIBERO: `python -m vla_rl.recipes.eval_libero CHECKPOINT`.

Runs every task of the suites from every initial state (with every scene seed) exactly once, prints
a table of success rates with 95 % intervals, and writes a folder in `runs/`:

    config.json, versions.json   the configuration, and the versions of the software
    episodes.jsonl               one line per episode, written when the episode ends
    results.json                 conditions, rates by task and suite, and every episode
    videos/                      videos of failures, or of what `--videos` selects

If it is killed, only the running episodes are lost; `--resume runs/eval-...` runs the missing ones.

    ... CHECKPOINT --init-states 40-49                   held-out initial states only
    ... CHECKPOINT --scenes same                         the same fixtures in every trial, as in SimpleVLA-RL
    ... CHECKPOINT --suites liberopro.libero_goal_swap   LIBERO-PRO or LIBERO-plus, with a table by perturbation
    ... CHECKPOINT --suites liberoplus.libero_goal --perturbations camera robot --init-states 0
    ... CHECKPOINT --temperature 1.0                     sampled instead of greedy
    ... CHECKPOINT --suites libero_goal --tasks 0-3,7    some tasks
    ... CHECKPOINT --record-to data                      also write every episode into a LeRobotDataset
"""

import asyncio
import dataclasses
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import msgspec
import tyro
from rich.console import Console
from rich.progress import Progress
from rich.syntax import Syntax

from vla_rl import engines
from vla_rl.actors import Runtime
from vla_rl.actors.completion import run_to_its_end
from vla_rl.commands.command_line import Command, Launch, run_recipe
from vla_rl.commands.config_files import convert, read_table
from vla_rl.commands.opening import distinct, open_each
from vla_rl.engines import EngineConfig
from vla_rl.envs.libero.packages import other_libero
from vla_rl.errors import ConfigError
from vla_rl.evaluation import (
    EpisodeResult,
    ResultFile,
    play_each,
    result_of,
    result_table,
    within_range,
)
from vla_rl.evaluation.benchmark import (
    LIBERO,
    Benchmark,
    SuiteTask,
    benchmark_of,
    expected_of,
    require_fitting,
)
from vla_rl.evaluation.conditions import note_conditions, refuse_other_conditions
from vla_rl.evaluation.libero import key_of, parse_numbers, parse_task_ids, tasks_of
from vla_rl.evaluation.plan import (
    conditions_in_words,
    one_of_each_kind,
    planned_episodes,
    print_plan,
    require_goal_files,
)
from vla_rl.evaluation.results import by_perturbation, by_task, summary_of
from vla_rl.evaluation.robustness import kind_of_change, robustness_table
from vla_rl.evaluation.scenes import LiberoScene, Physics, Quality, Scene, Scenes
from vla_rl.evaluation.shipped import assets_in_use, other_pictures, resolve_checkpoint
from vla_rl.models.loading import (
    SHIPPED,
    CheckpointConfig,
    described,
    digest_of,
    load_policy,
    weight_bytes,
)
from vla_rl.observe import RunDirectory
from vla_rl.observe.outlet import FailureStreak
from vla_rl.observe.run_directory import require_writable
from vla_rl.observe.versions import versions
from vla_rl.observe.videos import write_video
from vla_rl.observe.whole_file import write_whole
from vla_rl.rollout import embodied_agent
from vla_rl.simulation import SimulatorConfig, SimulatorPool
from vla_rl.training.agents import check_recording, digest_of_run, recorded
from vla_rl.training.stopping import StopSignal
from vla_rl.types import EnvSpec, EpisodeSpec, Trajectory

if TYPE_CHECKING:
    from vla_rl.models.loading import VlaPolicy

logger = logging.getLogger(__name__)

VIDEO_FRAMES_PER_S = 5.0
"""One frame for each decision."""


MOST_PREPARED = 100
"""Scenes that are built once and shared by all simulators; enough for all of LIBERO-90.
LIBERO-plus's suites have 2500 tasks; scenes beyond this number are built by the simulator that runs
them, so that memory is bounded."""


class EvalConfig(CheckpointConfig, frozen=True, kw_only=True):
    """The checkpoint, the episodes and the conditions of an evaluation on any benchmark."""

    benchmark: ClassVar[Benchmark]
    """The benchmark whose suites are evaluated."""

    checkpoint: tyro.conf.Positional[str]
    """Folder or hub id of an OpenVLA or OpenVLA-OFT checkpoint."""

    suites: tuple[str, ...]
    """Suites of the benchmark."""

    tasks: str = "all"
    """Tasks of each suite by the benchmark's numbers: all, or numbers and ranges such as 0-3,7."""

    init_states: str = "all"
    """Initial states of each task: all, or numbers and ranges, such as 40-49 for those that
    training did not use."""

    step_limit: int | None = None
    """Control steps after which an episode is a failure. None: each suite's published limit. Set
    512 for SRPO's limit."""

    temperature: float | None = None
    """Sample actions at this temperature, above 0. None: take the most likely action."""

    image_size: int | None = None
    """Side of the camera images in pixels. None: 84 for the shipped policy, else 256, as published
    policies were trained."""

    quality: Quality | None = None
    """Rendering quality. exact renders what published policies saw; fast renders without smoothing
    and with a plain robot, at a fraction of the cost. None: fast for the shipped policy, which was
    trained with it, else exact."""

    num_envs: int = max(os.cpu_count() or 1, 1)
    """Number of simulator processes, and so of episodes that run at the same time. Default: one for
    each core."""

    torch_threads: int = 1
    """Threads for the policy on a CPU. The simulators need cores too."""

    videos: Literal["none", "failures", "successes", "both"] = "failures"
    """Episodes to make videos of."""

    videos_per_task: int = 3
    """Maximum number of videos of each task and outcome."""

    record_to: str | None = None
    """Also write every control step of every episode into this LeRobotDataset. Slower, because
    every step is rendered."""

    root: str = "runs"
    """Parent of the evaluation's folder."""

    name: str = "eval"
    """First part of the folder's name."""

    seed: int = 0
    """Seed of sampled actions."""

    def __post_init__(self) -> None:
        self.require(len(self.suites) > 0, "suites", "at least one suite")
        self.require(
            self.step_limit is None or self.step_limit >= 1,
            "step_limit",
            "at least 1 control step, or none",
        )
        self.require(
            self.temperature is None or self.temperature > 0,
            "temperature",
            "above 0, or none for greedy",
        )
        for field in ("num_envs", "torch_threads", "videos_per_task"):
            self.require(getattr(self, field) >= 1, field, "at least 1")
        for suite in self.suites:
            self.require(
                benchmark_of(suite) is self.benchmark,
                "suites",
                f"suites of {expected_of(self.benchmark, suite)}",
            )
        planned_episodes(self)

    def unread(self) -> Mapping[str, str]:
        """Return the options of videos, if there are none."""
        return {} if self.videos != "none" else {"videos_per_task": "videos is 'none'"}

    @property
    def scene(self) -> Scene:
        """Conditions of the environments."""
        raise NotImplementedError

    @property
    def checkpoint_folder(self) -> str:
        """Folder or hub id of the checkpoint that `checkpoint` names."""
        return self.checkpoint

    def envs_of(self, task: SuiteTask) -> Sequence[EnvSpec]:
        """Return the environments in which each start of a task is run."""
        return [self.scene.env(task.suite, task.task_id)]

    def found(self) -> dict[str, str]:
        """Return conditions that are found on this machine. Raises: ConfigError."""
        return {}

    def is_chosen(self, task: SuiteTask) -> bool:
        """Return whether one of the tasks that `tasks` names is run."""
        return True


class EvalLiberoConfig(EvalConfig, frozen=True, kw_only=True):
    """The checkpoint, the episodes and the conditions of an evaluation on LIBERO."""

    benchmark: ClassVar[Benchmark] = LIBERO

    checkpoint: tyro.conf.Positional[str] = SHIPPED
    """Folder or hub id of an OpenVLA or OpenVLA-OFT checkpoint. shipped: the base policy of this
    package that was trained on the assets in use."""

    suites: tuple[str, ...] = ("libero_object",)
    """Suites of LIBERO, or, behind the package's name, of LIBERO-PRO and LIBERO-plus:
    liberopro.libero_goal_swap."""

    perturbations: tuple[str, ...] = ()
    """Kinds of change of LIBERO-PRO and LIBERO-plus to run, such as camera robot language noise; none
    stands for tasks as LIBERO has them. Default: all."""

    scene_seeds: str = "0"
    """Seeds of what initial states leave open, the positions of fixtures. Every episode is run once
    for each seed."""

    scenes: Scenes = "published"
    """Positions of fixtures. published: trial k of a task, from initial state k, uses LIBERO's k-th
    reset after one seeding, as OpenVLA, OpenVLA-OFT and openpi do. same: every trial uses the first
    reset, as SimpleVLA-RL does."""

    physics: Physics = "exact"
    """exact gives robosuite's results bit for bit; fast is quicker and equals them up to
    rounding."""

    assets: str | None = None
    """Folder of LIBERO's assets, or `stand-ins`. None: the folder in VLA_RL_LIBERO_ASSETS; if that
    is not set, LIBERO's own, or stand-ins if those are not installed."""

    def __post_init__(self) -> None:
        super().__post_init__()
        kinds = {
            kind_of_change(tasks[number])
            for suite in self.suites
            for tasks in [tasks_of(suite, "suites")]
            for number in parse_task_ids(self.tasks, tasks, f"tasks of {suite}")
        }
        self.require(
            kinds.issuperset(self.perturbations),
            "perturbations",
            f"kinds that the chosen tasks have: {', '.join(sorted(kinds))}",
        )

    @property
    def checkpoint_folder(self) -> str:
        """Folder or hub id of the checkpoint that `checkpoint` names."""
        return resolve_checkpoint(self.checkpoint, self.assets)

    @property
    def scene(self) -> LiberoScene:
        """Conditions of the environments."""
        return LiberoScene.for_policy(
            self.checkpoint,
            image_size=self.image_size,
            quality=self.quality,
            assets=self.assets,
            physics=self.physics,
            step_limit=self.step_limit,
            scenes=self.scenes,
        )

    def envs_of(self, task: SuiteTask) -> Sequence[EnvSpec]:
        """Return the environment of a task with each of the scene seeds."""
        scene = self.scene
        return [
            scene.env(task.suite, task.task_id, scene_seed)
            for scene_seed in parse_numbers(self.scene_seeds, 1 << 31, "scene_seeds")
        ]

    def found(self) -> dict[str, str]:
        """Return the assets that are found, and the LIBERO if it is another than the usual one.

        Raises: ConfigError without assets.
        """
        assets = assets_in_use(self.assets)
        found = {"assets": assets.source, "assets_path": str(assets.path)}
        libero = other_libero()
        return found if libero is None else {**found, "libero": libero}

    def is_chosen(self, task: SuiteTask) -> bool:
        """Return whether the task's kind of change is one of `perturbations`."""
        return not self.perturbations or kind_of_change(task) in self.perturbations


MAY_CHANGE = (
    "suites",
    "tasks",
    "perturbations",
    "init_states",
    "scene_seeds",
    "num_envs",
    "torch_threads",
    "videos",
    "videos_per_task",
)
"""Fields that may change on a resume; a change of any other would mix results of different
conditions."""


@dataclasses.dataclass(frozen=True)
class EvalLaunch(Launch):
    """Options of an evaluation besides its configuration."""

    recorded_before: ClassVar[Mapping[str, Any]] = MappingProxyType({"scenes": "same"})

    resume: Path | None = None
    """Continue the evaluation in this folder: run the episodes that are still missing."""


async def main(command: Command[EvalLaunch, EvalConfig]) -> int:
    """Print the plan, or run the episodes and print the tables."""
    config, console = command.config, Console()
    folder = command.launch.resume
    if folder is not None:
        _refuse_other_conditions(config, _config_of(folder, type(config)), folder)
    episodes = planned_episodes(config)
    if command.launch.dry_run:
        await _show_plan(config, episodes, folder, console)
        return 0
    conditions = conditions_of(config)
    model = None if folder else await asyncio.to_thread(_load, config)
    run = (
        RunDirectory.resume(folder)
        if folder
        else RunDirectory.create(Path(config.root), config.name, config)
    )
    _note_conditions(run, conditions)
    with_assets = f"; assets: {conditions['assets']}" if "assets" in conditions else ""
    console.print(
        f"evaluation {run.path}: {len(episodes)} episodes of {config.checkpoint_folder}{with_assets}"
    )
    warning = other_pictures(
        config.checkpoint_folder,
        conditions.get("assets", ""),
        config.scene.image_size,
        config.scene.quality,
    )
    if warning is not None:
        console.print(warning)
    with (
        ResultFile(run.path / "episodes.jsonl") as file,
        StopSignal("losing the running episodes") as stop,
    ):
        missing = [episode for episode in episodes if key_of(episode) not in file.results]
        if missing:
            player = await asyncio.to_thread(_load, config) if model is None else model
            console.print(described(player))
            await stop.unless_asked(
                _play(player, config, conditions, missing, file, run, len(episodes))
            )
        results, num_waiting = list(file.results.values()), file.num_waiting
        num_missing = sum(key_of(episode) not in file.results for episode in episodes)
    is_written = num_waiting == 0
    if results:
        sizes = {"num_planned": len(episodes), "num_missing": num_missing}
        title = title_of(config.checkpoint_folder, conditions, **sizes)
        _print_tables(results, title, conditions_in_words(config), console)
        is_written &= await asyncio.to_thread(
            _write_results_or_say, run.path / "results.json", conditions, results, sizes
        )
    console.print(f"everything of this evaluation is in {run.path}")
    if stop.is_asked or not is_written:
        console.print(f"continue with --resume {run.path}")
    return stop.exit_status or int(not is_written)


async def _show_plan(
    config: EvalConfig, episodes: list[EpisodeSpec], folder: Path | None, console: Console
) -> None:
    """Print the plan, and read everything that the evaluation would read."""
    console.print(
        Syntax(msgspec.json.format(msgspec.json.encode(config), indent=2).decode(), "json")
    )
    num_done = sum(key_of(episode) in _results_of(folder) for episode in episodes)
    weights = weight_bytes(config.opened(config.checkpoint_folder))
    print_plan(config, episodes, num_done, config.num_envs, weights, console)
    await _rehearse(config, episodes, folder)
    console.print("everything that the evaluation would read was found")


def _print_tables(
    results: Sequence[EpisodeResult], title: str, caption: str, console: Console
) -> None:
    tables = [result_table(results, title)]
    if any(result.perturbation for result in results):
        tables.append(robustness_table(results, title))
    for table in tables:
        table.caption = caption
        console.print(table)


def conditions_of(config: EvalConfig) -> dict[str, Any]:
    """Return everything that results depend on, as plain values.

    Raises: CheckpointError; ConfigError without assets.
    """
    names = set(config.__struct_fields__) - {
        *MAY_CHANGE,
        "root",
        "name",
        "record_to",
        "assets",
        "checkpoint",
    }
    return {
        "checkpoint": config.checkpoint_folder,
        "checkpoint_digest": digest_of(config.opened(config.checkpoint_folder)),
        **config.found(),
        **{name: getattr(config, name) for name in sorted(names)},
        "image_size": config.scene.image_size,
        "quality": config.scene.quality,
    }


async def _rehearse(config: EvalConfig, episodes: list[EpisodeSpec], folder: Path | None) -> None:
    """Read everything that the evaluation would read. Raises: what the evaluation would raise."""
    conditions = conditions_of(config)
    if folder is None:
        require_writable(Path(config.root))
    else:
        refuse_other_conditions(folder / "conditions.json", conditions)
    envs = distinct(episode.env for episode in episodes)
    await asyncio.to_thread(check_recording, config.record_to, envs)
    await asyncio.to_thread(_load, config)
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
        note_conditions(run.path / "conditions.json", conditions)
    except OSError as error:
        raise ConfigError(
            f"the evaluation {run.path} cannot be written: {error}; make room, or choose another "
            "folder (--root)"
        ) from error


def _write_results_or_say(
    path: Path, conditions: dict[str, Any], results: list[EpisodeResult], sizes: dict[str, int]
) -> bool:
    """Write `results.json`; if that fails, log a warning and return False.

    A resume writes it without new episodes.
    """
    try:
        write_results(path, conditions, results, **sizes)
    except OSError as error:
        logger.warning("%s could not be written: %s", path, error)
        return False
    return True


def title_of(
    checkpoint: str, conditions: dict[str, Any], *, num_planned: int, num_missing: int
) -> str:
    """Return the title of the table; for an interrupted evaluation, it warns that the rates are
    biased.
    """
    named = [
        f"{name}: {conditions[name]}"
        for name in ("libero", "assets", "scenes")
        if name in conditions
    ]
    title = ", ".join([checkpoint, *named])
    if num_missing == 0:
        return title
    return (
        f"{title}; incomplete: {num_planned - num_missing} of {num_planned} episodes, those "
        "running were lost, so rates favour short ones"
    )


def write_results(
    path: Path,
    conditions: dict[str, Any],
    results: list[EpisodeResult],
    *,
    num_planned: int,
    num_missing: int,
) -> None:
    """Write `results.json`: it appears whole or not at all."""
    tasks = by_task(results)
    suites = list(dict.fromkeys(of_task[0].suite for of_task in tasks.values()))
    content = {
        "conditions": conditions,
        "versions": versions(),
        "planned_episodes": num_planned,
        "missing_episodes": num_missing,
        "is_complete": num_missing == 0,
        "summary": summary_of(results),
        "suites": {
            suite: summary_of([result for result in results if result.suite == suite])
            for suite in suites
        },
        "perturbations": {
            kind: summary_of(of_kind) for kind, of_kind in by_perturbation(results).items()
        },
        "tasks": {task: summary_of(of_task) for task, of_task in tasks.items()},
        "episodes": [result for of_task in tasks.values() for result in of_task],
    }
    write_whole(path, msgspec.json.format(msgspec.json.encode(content), indent=1) + b"\n")


class ResultKeeper:
    """Stores the result of each episode, then makes a video if one is wanted.

    One episode at a time.
    """

    def __init__(self, config: EvalConfig, file: ResultFile, videos: Path) -> None:
        self._config, self._file, self._videos = config, file, videos
        self._turn = asyncio.Lock()
        self._failures = FailureStreak(f"writing videos to {videos}", "that episode has none")

    @property
    def num_failed_videos(self) -> int:
        """Videos that could not be written."""
        return self._failures.num_failed

    async def keep(self, trajectory: Trajectory) -> None:
        """Store a result on disk, then make its video.

        A video that cannot be made is reported and counted.
        """
        result = result_of(trajectory)
        async with self._turn:
            await run_to_its_end(self._file.add, result)
            try:
                await run_to_its_end(_film, self._config, trajectory, result, self._videos)
            except (OSError, ValueError) as error:
                self._failures.failed(str(result.key), error)
            else:
                self._failures.worked()


def _load(config: EvalConfig) -> "VlaPolicy":
    model = load_policy(config.checkpoint_folder, config, config.device)
    require_fitting(model, config.checkpoint_folder, config.benchmark)
    return model


async def _play(
    model: "VlaPolicy",
    config: EvalConfig,
    conditions: dict[str, Any],
    missing: list[EpisodeSpec],
    file: ResultFile,
    run: RunDirectory,
    num_planned: int,
) -> None:
    envs = [episode.env for episode in missing]
    agent = await recorded(
        within_range(embodied_agent), config.record_to, envs, digest_of_run(conditions)
    )
    simulators = SimulatorConfig(num_envs=min(config.num_envs, len(missing)), rss_limit_mb=4000)
    specs = list({str(episode.env): episode.env for episode in missing}.values())[:MOST_PREPARED]
    with Progress(console=Console()) as progress:
        bar = progress.add_task(
            "evaluating", total=num_planned, completed=num_planned - len(missing)
        )
        keeper = ResultKeeper(config, file, run.videos)

        async def done(trajectory: Trajectory) -> None:
            await keeper.keep(trajectory)
            successes = sum(result.is_success for result in file.results.values())
            progress.update(
                bar, advance=1, description=f"{successes} of {len(file.results)} succeeded"
            )

        async with (
            Runtime(config.name) as runtime,
            engines.DeviceLane(config.torch_threads) as lane,
            SimulatorPool(runtime, simulators, specs=specs) as pool,
            engines.TorchActionEngine(model, lane, EngineConfig(max_batch=pool.num_envs)) as engine,
        ):
            await play_each(pool, engine, agent, missing, done)


def _film(config: EvalConfig, trajectory: Trajectory, result: EpisodeResult, folder: Path) -> None:
    """Make a video if one is wanted and the task has too few of them."""
    outcome = "success" if result.is_success else "failure"
    wanted = {
        "none": (),
        "failures": ("failure",),
        "successes": ("success",),
        "both": ("failure", "success"),
    }
    kind = f"{result.suite}-{result.task_id}_{outcome}"
    if (
        outcome in wanted[config.videos]
        and len(list(folder.glob(f"{kind}_init-*.mp4"))) < config.videos_per_task
    ):
        path = folder / f"{kind}_init-{result.init_state_id}_scene-{result.scene_seed}.mp4"
        write_video(path, trajectory, "image", VIDEO_FRAMES_PER_S)


def _results_of(folder: Path | None) -> dict[tuple[str, int, int], EpisodeResult]:
    if folder is None:
        return {}
    with ResultFile(folder / "episodes.jsonl") as file:
        return file.results


def _config_of(folder: Path, config_type: type[EvalConfig]) -> EvalConfig:
    """Read the configuration of an evaluation, with the values of fields that are younger."""
    path = folder / "config.json"
    younger = {
        name: value
        for name, value in EvalLaunch.recorded_before.items()
        if name in config_type.__struct_fields__
    }
    return convert({**younger, **read_table(path, config_type)}, config_type, str(path))


def _refuse_other_conditions(config: EvalConfig, before: EvalConfig, folder: Path) -> None:
    for name in config.__struct_fields__:
        if name not in MAY_CHANGE and getattr(config, name) != getattr(before, name):
            raise ConfigError(
                f"{name} is {getattr(config, name)!r}, but the episodes in {folder} were run with "
                f"{getattr(before, name)!r}; start another evaluation, because one table cannot "
                "hold both"
            )


def cli() -> int:
    """Run the command line; return the exit status."""
    return run_recipe(EvalLaunch, EvalLiberoConfig, main, __doc__ or "")


if __name__ == "__main__":
    sys.exit(cli())
