"""The configuration of an evaluation on any benchmark: its episodes, its conditions, its memory."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal, Protocol

import msgspec
import tyro
from rich.console import Console
from rich.table import Table

from vla_rl.envs.image_env import NUM_STARTS
from vla_rl.envs.libero.tasks import Task, find_task
from vla_rl.errors import ConfigError
from vla_rl.evaluation.scenes import ImageSize, LiberoQuality, Scene, StepLimit
from vla_rl.evaluation.suites import (
    Benchmark,
    SuiteTask,
    count_initial_states,
    describe_suites,
    get_benchmark,
    libero_episode,
    list_suite_tasks,
    parse_numbers,
    parse_task_ids,
)
from vla_rl.models.loading import DecodingConfig, compute_digest
from vla_rl.reporting import MemoryItem, available_bytes, memory_table
from vla_rl.rollout import RealTimeConfig
from vla_rl.serving.remote_config import RemotePolicyConfig, is_server_address
from vla_rl.types import EnvSpec, EpisodeSpec, PositiveInt, ReadIf, Sampling
from vla_rl.util.values import FOLDER_NAME, names_folder

MIB = 2**20


class Starts(Protocol):
    """The part of a recipe's configuration that determines the episodes and their conditions."""

    @property
    def suites(self) -> tuple[str, ...]: ...
    @property
    def tasks(self) -> str: ...
    @property
    def init_states(self) -> str: ...
    @property
    def sampling(self) -> Sampling: ...
    @property
    def decoding_in_words(self) -> str: ...
    @property
    def seed(self) -> int: ...
    @property
    def benchmark(self) -> Benchmark: ...
    @property
    def scene(self) -> Scene: ...
    def envs_of(self, task: SuiteTask) -> Sequence[EnvSpec]: ...
    def is_chosen(self, task: SuiteTask) -> bool: ...


def planned_episodes(starts: Starts) -> list[EpisodeSpec]:
    """Return every task in each of its environments from every initial state, once.

    Raises: ConfigError for a suite, a task or an initial state that does not exist.
    """
    sampling = starts.sampling
    episodes: list[EpisodeSpec] = []
    for suite in starts.suites:
        tasks = list_suite_tasks(suite, "suites")
        for task_id in parse_task_ids(starts.tasks, tasks, f"tasks of {suite}"):
            task = tasks[task_id]
            for env in starts.envs_of(task) if starts.is_chosen(task) else ():
                what = f"init_states of {task.key}"
                for state in parse_numbers(
                    starts.init_states, count_initial_states(task), what, limit=NUM_STARTS
                ):
                    episodes.append(
                        libero_episode(
                            env, len(episodes), task.key, state, sampling=sampling, seed=starts.seed
                        )
                    )
    if len(
        # a suite that is named twice would count each of its starts twice in the rate
        {(episode.task, episode.options["init_state_id"], str(episode.env)) for episode in episodes}
    ) < len(episodes):
        raise ConfigError(f"suites are {starts.suites}, expected each once")
    return episodes


def describe_conditions(starts: Starts) -> str:
    """Return what a reader of the table has to know to compare it with another one."""
    limits: dict[int, list[str]] = {}
    for suite in starts.suites:
        limit = starts.scene.step_limit or starts.benchmark.step_limit_of(suite)
        limits.setdefault(limit, []).append(suite)
    named = (
        str(limit) if len(limits) == 1 else f"{limit} ({', '.join(suites)})"
        for limit, suites in limits.items()
    )
    size = starts.scene.image_size
    return (
        f"{starts.scene.in_words}, images of {size} x {size} pixels; at most "
        f"{', '.join(named)} control steps; actions: {starts.decoding_in_words}; "
        f"initial states: {starts.init_states}"
    )


def one_of_each_kind(episodes: Sequence[EpisodeSpec]) -> list[EnvSpec]:
    """Return the first environment of each suite of LIBERO and kind of perturbation, in order."""
    chosen: dict[tuple[str, str], EnvSpec] = {}
    for episode in episodes:
        task = _episode_task(episode)
        chosen.setdefault((task.suite, task.perturbation), episode.env)
    return list(chosen.values())


def require_goal_files(episodes: Sequence[EpisodeSpec]) -> None:
    """Raise ConfigError naming the first task of LIBERO whose goal file is not there.

    Files of initial states need no check here: `planned_episodes` has read them.
    """
    # each task once: thousands of starts share a few goal files
    for task in dict.fromkeys(map(_episode_task, episodes)):
        if not task.goal_file.is_file():
            raise ConfigError(
                f"{task.key} needs {task.goal_file}, which is not there: this distribution of the "
                "package leaves it out; choose other tasks with --tasks"
            )


def _episode_task(episode: EpisodeSpec) -> Task:
    suite, _, number = episode.task.rpartition("/")
    return find_task(suite, int(number))


def print_plan(
    starts: Starts,
    episodes: Sequence[EpisodeSpec],
    num_done: int,
    num_envs: int,
    weights: int,
    console: Console,
) -> None:
    """Print the episodes that would be run, and the memory that they need.

    Args:
        starts: the configuration.
        episodes: all episodes of the plan.
        num_done: number of episodes that have been run already.
        num_envs: number of simulators.
        weights: size of the policy's weights in bytes.
        console: console to print on.
    """
    table = Table(
        "suite", "tasks", "episodes", "control steps at most", title="Episodes, each once"
    )
    for suite in starts.suites:
        of_suite = [episode for episode in episodes if episode.task.startswith(f"{suite}/")]
        limit = starts.scene.step_limit or starts.benchmark.step_limit_of(suite)
        num_tasks = len({episode.task for episode in of_suite})
        table.add_row(
            suite,
            str(num_tasks),
            str(len(of_suite)),
            f"{limit} each, {limit * len(of_suite)} in all",
        )
    console.print(table)
    console.print(
        f"{len(episodes)} episodes, {num_done} of them done already; {num_envs} at a time; actions: "
        f"{starts.decoding_in_words}; {starts.scene.in_words}",
        markup=False,
    )
    benchmark, scene = starts.benchmark, starts.scene
    longest = max(scene.step_limit or benchmark.step_limit_of(suite) for suite in starts.suites)
    # both cameras, three bytes a pixel; an episode keeps all of them until its record is written
    num_image_bytes = 2 * 3 * scene.image_size**2
    items = [
        MemoryItem("Python, torch and the rest of this process", 700 * MIB),
        MemoryItem("weights of the policy, on its device", weights),
        MemoryItem("the server that simulators are forked from", benchmark.server_mb * MIB),
        MemoryItem(
            "simulator processes, private memory of each", benchmark.simulator_mb * MIB, num_envs
        ),
        MemoryItem("images of the running episodes, at most", longest * num_image_bytes, num_envs),
    ]
    console.print(memory_table("Memory estimate", items, available_bytes()))


class EvalConfig(DecodingConfig, frozen=True, kw_only=True):
    """The checkpoint, the episodes and the conditions of an evaluation on any benchmark."""

    READ_IF: ClassVar[tuple[ReadIf, ...]] = (ReadIf(("videos_per_task",), "videos"),)

    benchmark: ClassVar[Benchmark]
    """The benchmark whose suites are evaluated."""

    checkpoint: tyro.conf.Positional[str]
    """Folder or hub id of a checkpoint, or the address of a policy server, ws://HOST:PORT."""

    suites: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
    """Suites of the benchmark."""

    tasks: str = "all"
    """Tasks of each suite by the benchmark's numbers: all, or numbers and ranges such as 0-3,7."""

    init_states: str = "all"
    """Initial states of each task: all, or numbers and ranges, such as 40-49 for those that
    training did not use."""

    step_limit: StepLimit | None = None
    """None: each suite's published limit. Set 512 for SRPO's limit."""

    image_size: ImageSize | None = None
    """None: the side that the checkpoint says it was trained with (84 for the shipped policy and for what is
    trained from it), its own for a flow policy that sees one size alone, else 256, as published policies were
    trained."""

    quality: LiberoQuality | None = None
    """None: the quality that the checkpoint says it was trained with (fast for the shipped policy and for what is
    trained from it), else exact."""

    num_envs: PositiveInt = max(os.cpu_count() or 1, 1)
    """Number of simulator processes, and so of episodes that run at the same time. Default: one for
    each core."""

    torch_threads: PositiveInt = 1
    """Threads for the policy on a CPU. The simulators need cores too."""

    real_time: RealTimeConfig = RealTimeConfig()

    videos: Literal["none", "failures", "successes", "both"] = "failures"
    """Episodes to make videos of."""

    videos_per_task: PositiveInt = 3
    """Maximum number of videos of each task and outcome."""

    record_to: str | None = None
    """Also write every control step of every episode into this LeRobotDataset. Slower, because
    every step is rendered."""

    server: RemotePolicyConfig = RemotePolicyConfig()

    root: str = "runs"
    """Parent of the evaluation's folder."""

    name: str = "eval"
    """First part of the folder's name."""

    def __post_init__(self) -> None:
        self.require(names_folder(self.name), "name", FOLDER_NAME)
        for suite in self.suites:
            self.require(
                get_benchmark(suite) is self.benchmark,
                "suites",
                f"suites of {describe_suites(self.benchmark, suite)}",
            )
        planned_episodes(self)
        self._require_fitting_options()

    def _require_fitting_options(self) -> None:
        """Raise ConfigError for options of a server with a checkpoint, or the other way round."""
        # not checkpoint_folder, which looks for assets: that is for the command to report
        address = self.checkpoint
        if not is_server_address(address):
            self.require(
                self.server == RemotePolicyConfig(),
                "server",
                f"an address such as ws://127.0.0.1:8000 instead of {address!r}, whose policy is "
                "loaded here",
            )
            return
        self.require(
            self.real_time.delay == 0,
            "real_time.delay",
            f"0: the policy at {address} is asked for one chunk after another",
        )
        for name in DecodingConfig.__struct_fields__:
            default = getattr(DecodingConfig(), name)
            self.require(
                name == "seed" or getattr(self, name) == default,
                name,
                f"{default!r}: the policy at {address} was told how to act when it was started",
            )

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
        return [self.scene.make_env_spec(task.suite, task.task_id)]

    def found(self) -> dict[str, str]:
        """Return conditions that are found on this machine. Raises: ConfigError."""
        return {}

    def is_chosen(self, task: SuiteTask) -> bool:
        """Return whether one of the tasks that `tasks` names is run."""
        return True


MAY_CHANGE: Final = (
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


def evaluation_conditions(config: EvalConfig, digest: str | None = None) -> dict[str, Any]:
    """Return everything that results depend on, as plain values.

    Args:
        config: the configuration.
        digest: fingerprint of the policy; None computes that of the checkpoint's files.

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
    # evaluations of earlier versions have no server and no delay among their conditions, and stay
    # comparable
    if not is_server_address(config.checkpoint_folder):
        names.remove("server")
    if config.real_time == RealTimeConfig():
        names.remove("real_time")
    # under the names that held-out episodes of a run have
    names.remove("by_mean")
    sampling = config.sampling
    by_mean = {"temperature": None, "by_mean_at": sampling.temperature} if sampling.by_mean else {}
    if digest is None:
        digest = compute_digest(config.list_files(config.checkpoint_folder))
    return {
        "checkpoint": config.checkpoint_folder,
        "checkpoint_digest": digest,
        **config.found(),
        **{name: getattr(config, name) for name in sorted(names)},
        "image_size": config.scene.image_size,
        "quality": config.scene.quality,
        **by_mean,
    }


def refuse_other_config(config: EvalConfig, before: EvalConfig, folder: Path) -> None:
    """Raise ConfigError if a field that may not change differs from the evaluation in `folder`."""
    for name in config.__struct_fields__:
        if name not in MAY_CHANGE and getattr(config, name) != getattr(before, name):
            raise ConfigError(
                f"{name} is {getattr(config, name)!r}, but the episodes in {folder} were run with "
                f"{getattr(before, name)!r}; start another evaluation, because one table cannot "
                "hold both"
            )
