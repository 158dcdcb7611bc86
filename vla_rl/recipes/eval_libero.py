"""Evaluate a checkpoint on LIBERO: `python -m vla_rl.recipes.eval_libero CHECKPOINT --suites libero_object`.

Plays every task of the suites from every initial state (with every scene seed) exactly once, prints a table of success rates
with 95 % intervals, and leaves a folder in `runs/`:

    config.json, versions.json   what was asked for, with which software
    episodes.jsonl               one line an episode, written as it ends
    results.json                 conditions, rates by task and suite, and every episode
    videos/                      of failures, or as `--videos` says

Killed at any moment it loses the episodes being played; `--resume runs/eval-...` plays those that are missing.

    ... CHECKPOINT --init-states 40-49                   held-out initial states only
    ... CHECKPOINT --scenes same                         the same fixtures in every trial, as SimpleVLA-RL has them
    ... CHECKPOINT --suites liberopro.libero_goal_swap   LIBERO-PRO or LIBERO-plus, with a table of their perturbations
    ... CHECKPOINT --temperature 1.0                     sampled instead of greedy
    ... CHECKPOINT --suites libero_goal --tasks 0-3,7    some tasks
    ... CHECKPOINT --record-to data                      also write every episode as a LeRobotDataset
"""

import asyncio
import dataclasses
import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import tyro
from rich.console import Console
from rich.progress import Progress
from rich.syntax import Syntax

from vla_rl.actors import Runtime
from vla_rl.actors.completion import run_to_its_end
from vla_rl.commands.command_line import Command, Launch, run_recipe
from vla_rl.commands.config_files import convert, read_table
from vla_rl.commands.opening import distinct, open_each
from vla_rl.engines import DeviceLane, EngineConfig, TorchEngine
from vla_rl.envs.libero.assets import Assets, find_assets
from vla_rl.errors import ConfigError
from vla_rl.evaluation import EpisodeResult, ResultFile, play_each, result_of, result_table, within_range
from vla_rl.evaluation.conditions import note_conditions, refuse_other_conditions
from vla_rl.evaluation.libero import key_of, require_for_libero
from vla_rl.evaluation.pictures import assets_for, picture_size_for, quality_for
from vla_rl.evaluation.plan import planned_episodes, print_plan
from vla_rl.evaluation.results import by_perturbation, by_task, summary_of
from vla_rl.models.loading import (
    BASE_POLICY,
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
from vla_rl.types import EpisodeSpec, Trajectory

if TYPE_CHECKING:
    from vla_rl.models.loading import VlaPolicy

logger = logging.getLogger(__name__)

VIDEO_FRAMES_PER_S = 5.0
"""One frame for each decision."""


MOST_PREPARED = 100
"""Scenes that are built once for all simulators, as all of LIBERO-90's are. LIBERO-plus's suites have 2500 tasks; scenes
beyond this number are built by the simulator that runs them, so that memory has a bound."""


class EvalLiberoConfig(CheckpointConfig, frozen=True, kw_only=True):
    """Which checkpoint, on which episodes, under which conditions."""

    checkpoint: tyro.conf.Positional[str] = str(BASE_POLICY)
    """Folder or hub id of an OpenVLA or OpenVLA-OFT checkpoint; the shipped base policy where it is left out."""

    suites: tuple[str, ...] = ("libero_object",)
    """Suites of LIBERO, or of LIBERO-PRO and LIBERO-plus with the package's name, such as liberopro.libero_goal_swap."""

    tasks: str = "all"
    """Tasks of each suite in LIBERO's own order: all, or numbers and ranges such as 0-3,7."""

    init_states: str = "all"
    """Initial states of each task: all, or such as 40-49 for those that training did not use."""

    scene_seeds: str = "0"
    """Seeds of what initial states leave open (where fixtures stand); each makes every episode once more."""

    scenes: Literal["published", "same"] = "published"
    """Where fixtures stand. published: trial k of a task, from initial state k, has LIBERO's reset k after one seeding, as
    OpenVLA, OpenVLA-OFT and openpi evaluate. same: every trial has the first reset, as SimpleVLA-RL evaluates."""

    step_limit: int | None = None
    """Control steps after which an episode is a failure; none for each suite's published limit, 512 for SRPO's."""

    temperature: float | None = None
    """Sample at this temperature; none takes the most likely action."""

    image_size: int | None = None
    """Side of the cameras' pictures in pixels. None: 84 for the policy that ships, else 256, as published policies were
    taught."""

    physics: Literal["exact", "fast"] = "exact"
    """exact computes robosuite's bits; fast is quicker, the same up to rounding."""

    quality: Literal["exact", "fast"] | None = None
    """exact draws what published policies saw; fast draws without smoothing and with a plain robot. None: fast for the
    policy that ships, which was taught with it, else exact."""

    assets: str | None = None
    """Folder of LIBERO's assets, or `stand-ins`. None: the folder in VLA_RL_LIBERO_ASSETS; without it, stand-ins for the
    policy that ships, which was trained on them, and LIBERO's own for any other (stand-ins if those are not installed)."""

    num_envs: int = max(os.cpu_count() or 1, 1)
    """Simulator processes, and so episodes played at the same time."""

    torch_threads: int = 1
    """Threads that the policy computes with on a CPU; the simulators need cores too."""

    videos: Literal["none", "failures", "successes", "both"] = "failures"
    """Of which episodes videos are made."""

    videos_per_task: int = 3
    """Most videos of each task and outcome."""

    record_to: str | None = None
    """Also write every control step of every episode into this LeRobotDataset; takes longer, as all of them are drawn."""

    root: str = "runs"
    """Folder in which the folder of this evaluation is made."""

    name: str = "eval"
    """First part of its name."""

    seed: int = 0
    """Seed of sampled actions."""

    def __post_init__(self) -> None:
        self.require(len(self.suites) > 0, "suites", "at least one suite")
        self.require(self.step_limit is None or self.step_limit >= 1, "step_limit", "at least 1 control step, or none")
        self.require(self.temperature is None or self.temperature > 0, "temperature", "above 0, or none for greedy")
        for field in ("num_envs", "torch_threads", "videos_per_task"):
            self.require(getattr(self, field) >= 1, field, "at least 1")
        planned_episodes(self, self.scenes)

    @property
    def picture_size(self) -> int:
        """The side that is drawn."""
        return picture_size_for(self.checkpoint, self.image_size)

    @property
    def pictures(self) -> Literal["exact", "fast"]:
        """The quality that is drawn in."""
        return quality_for(self.checkpoint, self.quality)

    @property
    def chosen_assets(self) -> str | None:
        """The assets to look for, as `find_assets` takes them."""
        return assets_for(self.checkpoint, self.assets)


MAY_CHANGE = ("suites", "tasks", "init_states", "scene_seeds", "num_envs", "torch_threads", "videos", "videos_per_task")
"""What a resumed evaluation may be asked for anew; anything else would mix results of different conditions."""


@dataclasses.dataclass(frozen=True)
class EvalLaunch(Launch):
    """What an evaluation can be told besides."""

    resume: Path | None = None
    """Go on with the evaluation in this folder: play what its plan still lacks."""


async def main(command: Command[EvalLaunch, EvalLiberoConfig]) -> int:
    """Plan or play, then print the tables."""
    config, console = command.config, Console()
    folder = command.launch.resume
    if folder is not None:
        _refuse_other_conditions(config, _config_in(folder), folder)
    episodes = planned_episodes(config, config.scenes)
    if command.launch.dry_run:
        console.print(Syntax(msgspec.json.format(msgspec.json.encode(config), indent=2).decode(), "json"))
        num_done = sum(key_of(episode) in _results_in(folder) for episode in episodes)
        print_plan(config, episodes, num_done, config.num_envs, weight_bytes(config.opened(config.checkpoint)), console)
        await _rehearse(config, episodes, folder)
        console.print("everything that the evaluation would read was found")
        return 0
    conditions = conditions_of(config)
    model = None if folder else await asyncio.to_thread(_load, config)
    run = RunDirectory.resume(folder) if folder else RunDirectory.create(Path(config.root), config.name, config)
    _note_conditions(run, conditions)
    console.print(f"evaluation {run.path}: {len(episodes)} episodes; assets: {conditions['assets']}")
    with ResultFile(run.path / "episodes.jsonl") as file, StopSignal("losing the episodes being played") as stop:
        missing = [episode for episode in episodes if key_of(episode) not in file.results]
        if missing:
            player = await asyncio.to_thread(_load, config) if model is None else model
            console.print(described(player))
            await stop.unless_asked(_play(player, config, conditions, missing, file, run, len(episodes)))
        results, num_waiting = list(file.results.values()), file.num_waiting
        num_missing = sum(key_of(episode) not in file.results for episode in episodes)
    is_written = num_waiting == 0
    if results:
        path, sizes = run.path / "results.json", {"num_planned": len(episodes), "num_missing": num_missing}
        console.print(result_table(results, title_of(config.checkpoint, conditions, **sizes)))
        is_written &= await asyncio.to_thread(_write_results_or_say, path, conditions, results, sizes)
    console.print(f"everything of this evaluation is in {run.path}")
    if stop.is_asked or not is_written:
        console.print(f"go on with --resume {run.path}")
    return stop.exit_status or int(not is_written)


def conditions_of(config: EvalLiberoConfig) -> dict[str, Any]:
    """What results depend on, as plain values. Raises: CheckpointError; ConfigError without assets."""
    assets = _assets_of(config)
    names = set(EvalLiberoConfig.__struct_fields__) - {*MAY_CHANGE, "root", "name", "record_to", "assets", "checkpoint"}
    return {
        "checkpoint": config.checkpoint,
        "checkpoint_digest": digest_of(config.opened(config.checkpoint)),
        "assets": assets.source,
        "assets_path": str(assets.path),
        **{name: getattr(config, name) for name in sorted(names)},
        "image_size": config.picture_size,
        "quality": config.pictures,
    }


async def _rehearse(config: EvalLiberoConfig, episodes: list[EpisodeSpec], folder: Path | None) -> None:
    """Look at everything that the evaluation would read. Raises: what the evaluation would raise."""
    conditions = conditions_of(config)
    if folder is None:
        require_writable(Path(config.root))
    else:
        refuse_other_conditions(folder / "conditions.json", conditions)
    envs = distinct(episode.env for episode in episodes)
    await asyncio.to_thread(check_recording, config.record_to, envs)
    await asyncio.to_thread(_load, config)
    await open_each(envs, SimulatorConfig(rss_limit_mb=4000))


def _note_conditions(run: RunDirectory, conditions: dict[str, Any]) -> None:
    try:
        note_conditions(run.path / "conditions.json", conditions)
    except OSError as error:
        raise ConfigError(
            f"the evaluation {run.path} cannot be written: {error}; make room, or choose --root"
        ) from error


def _write_results_or_say(
    path: Path, conditions: dict[str, Any], results: list[EpisodeResult], sizes: dict[str, int]
) -> bool:
    """Write `results.json`; False, with a line, if it cannot be written. A resume plays nothing twice and writes it."""
    try:
        write_results(path, conditions, results, **sizes)
    except OSError as error:
        logger.warning("%s could not be written: %s", path, error)
        return False
    return True


def title_of(checkpoint: str, conditions: dict[str, Any], *, num_planned: int, num_missing: int) -> str:
    """What stands above the table; of an evaluation that was interrupted, what is wrong with its rates."""
    title = f"{checkpoint}, assets: {conditions['assets']}, scenes: {conditions['scenes']}"
    if num_missing == 0:
        return title
    return (
        f"{title}; incomplete: {num_planned - num_missing} of {num_planned} episodes, those running were lost, so rates "
        "favour short ones"
    )


def write_results(
    path: Path, conditions: dict[str, Any], results: list[EpisodeResult], *, num_planned: int, num_missing: int
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
        "suites": {suite: summary_of([result for result in results if result.suite == suite]) for suite in suites},
        "perturbations": {kind: summary_of(of_kind) for kind, of_kind in by_perturbation(results).items()},
        "tasks": {task: summary_of(of_task) for task, of_task in tasks.items()},
        "episodes": [result for of_task in tasks.values() for result in of_task],
    }
    write_whole(path, msgspec.json.format(msgspec.json.encode(content), indent=1) + b"\n")


class ResultKeeper:
    """Keeps the result of each episode, then makes a video of those that are wanted. One episode at a time."""

    def __init__(self, config: EvalLiberoConfig, file: ResultFile, videos: Path) -> None:
        self._config, self._file, self._videos = config, file, videos
        self._turn = asyncio.Lock()
        self._failures = FailureStreak(f"writing videos to {videos}", "that episode has none")

    @property
    def num_failed_videos(self) -> int:
        """Videos that could not be written."""
        return self._failures.num_failed

    async def keep(self, trajectory: Trajectory) -> None:
        """Keep a result; a video that cannot be made is reported and counted. The result is on disk before it is tried."""
        result = result_of(trajectory)
        async with self._turn:
            await run_to_its_end(self._file.add, result)
            try:
                await run_to_its_end(_film, self._config, trajectory, result, self._videos)
            except (OSError, ValueError) as error:
                self._failures.failed(str(result.key), error)
            else:
                self._failures.worked()


def _load(config: EvalLiberoConfig) -> "VlaPolicy":
    model = load_policy(config.checkpoint, config, config.device)
    require_for_libero(model, config.checkpoint)
    return model


async def _play(
    model: "VlaPolicy",
    config: EvalLiberoConfig,
    conditions: dict[str, Any],
    missing: list[EpisodeSpec],
    file: ResultFile,
    run: RunDirectory,
    num_planned: int,
) -> None:
    envs = [episode.env for episode in missing]
    agent = await recorded(within_range(embodied_agent), config.record_to, envs, digest_of_run(conditions))
    simulators = SimulatorConfig(num_envs=min(config.num_envs, len(missing)), rss_limit_mb=4000)
    specs = list({str(episode.env): episode.env for episode in missing}.values())[:MOST_PREPARED]
    with Progress(console=Console()) as progress:
        bar = progress.add_task("playing", total=num_planned, completed=num_planned - len(missing))
        keeper = ResultKeeper(config, file, run.videos)

        async def done(trajectory: Trajectory) -> None:
            await keeper.keep(trajectory)
            successes = sum(result.is_success for result in file.results.values())
            progress.update(bar, advance=1, description=f"{successes} of {len(file.results)} succeeded")

        async with (
            Runtime(config.name) as runtime,
            DeviceLane(config.torch_threads) as lane,
            SimulatorPool(runtime, simulators, specs=specs) as pool,
            TorchEngine(model, lane, EngineConfig(max_batch=pool.num_envs)) as engine,
        ):
            await play_each(pool, engine, agent, missing, done)


def _film(config: EvalLiberoConfig, trajectory: Trajectory, result: EpisodeResult, folder: Path) -> None:
    """Make a video where one is wanted and the task has not enough of them."""
    outcome = "success" if result.is_success else "failure"
    wanted = {"none": (), "failures": ("failure",), "successes": ("success",), "both": ("failure", "success")}
    kind = f"{result.suite}-{result.task_id}_{outcome}"
    if outcome in wanted[config.videos] and len(list(folder.glob(f"{kind}_init-*.mp4"))) < config.videos_per_task:
        path = folder / f"{kind}_init-{result.init_state_id}_scene-{result.scene_seed}.mp4"
        write_video(path, trajectory, "image", VIDEO_FRAMES_PER_S)


def _results_in(folder: Path | None) -> dict[tuple[str, int, int], EpisodeResult]:
    if folder is None:
        return {}
    with ResultFile(folder / "episodes.jsonl") as file:
        return file.results


def _config_in(folder: Path) -> EvalLiberoConfig:
    """The configuration of an evaluation. One without `scenes` is older than that option and had them the same."""
    path = folder / "config.json"
    return convert({"scenes": "same", **read_table(path, EvalLiberoConfig)}, EvalLiberoConfig, str(path))


def _refuse_other_conditions(config: EvalLiberoConfig, before: EvalLiberoConfig, folder: Path) -> None:
    for name in EvalLiberoConfig.__struct_fields__:
        if name not in MAY_CHANGE and getattr(config, name) != getattr(before, name):
            raise ConfigError(
                f"{name} is {getattr(config, name)!r}, but the episodes in {folder} were played with "
                f"{getattr(before, name)!r}; begin another evaluation, as one table cannot hold both"
            )


def _assets_of(config: EvalLiberoConfig) -> Assets:
    try:
        return find_assets(config.chosen_assets)
    except FileNotFoundError as error:
        raise ConfigError(str(error)) from error


def cli() -> int:
    """The command line."""
    return run_recipe(EvalLaunch, EvalLiberoConfig, main, __doc__ or "")


if __name__ == "__main__":
    sys.exit(cli())
