"""The plan of an evaluation: its episodes, their maximum lengths, and the memory that they need."""

from collections.abc import Sequence
from typing import Protocol

from rich.console import Console
from rich.table import Table

from vla_rl.envs.image_env import NUM_STARTS
from vla_rl.envs.libero.tasks import Task, find_task
from vla_rl.errors import ConfigError
from vla_rl.evaluation.benchmark import Benchmark, SuiteTask
from vla_rl.evaluation.libero import (
    libero_episode,
    num_states_of,
    parse_numbers,
    parse_task_ids,
    tasks_of,
)
from vla_rl.evaluation.scenes import Scene
from vla_rl.reporting import MemoryItem, available_bytes, memory_table
from vla_rl.types import EnvSpec, EpisodeSpec, Sampling

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
    def temperature(self) -> float | None: ...
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
    greedy = starts.temperature is None
    sampling = Sampling(
        greedy=greedy, temperature=1.0 if starts.temperature is None else starts.temperature
    )
    episodes: list[EpisodeSpec] = []
    for suite in starts.suites:
        tasks = tasks_of(suite, "suites")
        for task_id in parse_task_ids(starts.tasks, tasks, f"tasks of {suite}"):
            task = tasks[task_id]
            for env in starts.envs_of(task) if starts.is_chosen(task) else ():
                what = f"init_states of {task.key}"
                for state in parse_numbers(
                    starts.init_states, num_states_of(task), what, limit=NUM_STARTS
                ):
                    episodes.append(
                        libero_episode(
                            env, len(episodes), task.key, state, sampling=sampling, seed=starts.seed
                        )
                    )
    if len(
        {(episode.task, episode.options["init_state_id"], str(episode.env)) for episode in episodes}
    ) < len(episodes):
        raise ConfigError(f"suites are {starts.suites}, expected each once")
    return episodes


def conditions_in_words(starts: Starts) -> str:
    """Return what a reader of the table has to know to compare it with another one."""
    limits: dict[int, list[str]] = {}
    for suite in starts.suites:
        limit = starts.scene.step_limit or starts.benchmark.step_limit_of(suite)
        limits.setdefault(limit, []).append(suite)
    named = (
        str(limit) if len(limits) == 1 else f"{limit} ({', '.join(suites)})"
        for limit, suites in limits.items()
    )
    size, temperature = starts.scene.image_size, starts.temperature
    actions = "greedy" if temperature is None else f"sampled at temperature {temperature:g}"
    return (
        f"{starts.scene.in_words}, pictures of {size} x {size} pixels; at most "
        f"{', '.join(named)} control steps; actions: {actions}; "
        f"initial states: {starts.init_states}"
    )


def one_of_each_kind(episodes: Sequence[EpisodeSpec]) -> list[EnvSpec]:
    """Return the first environment of each suite of LIBERO and kind of perturbation, in order."""
    chosen: dict[tuple[str, str], EnvSpec] = {}
    for episode in episodes:
        task = _task_of(episode)
        chosen.setdefault((task.suite, task.perturbation), episode.env)
    return list(chosen.values())


def require_goal_files(episodes: Sequence[EpisodeSpec]) -> None:
    """Raise ConfigError naming the first task of LIBERO whose goal file is not there.

    Files of initial states need no check here: `planned_episodes` has read them.
    """
    for task in dict.fromkeys(map(_task_of, episodes)):
        if not task.goal_file.is_file():
            raise ConfigError(
                f"{task.key} needs {task.goal_file}, which is not there: this distribution of the "
                "package leaves it out; choose other tasks with --tasks"
            )


def _task_of(episode: EpisodeSpec) -> Task:
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
    how = (
        "greedily"
        if starts.temperature is None
        else f"sampled at temperature {starts.temperature:g}"
    )
    console.print(
        f"{len(episodes)} episodes, {how}, {num_done} of them done already; {num_envs} at a time; "
        f"{starts.scene.in_words}",
        markup=False,
    )
    benchmark, scene = starts.benchmark, starts.scene
    longest = max(scene.step_limit or benchmark.step_limit_of(suite) for suite in starts.suites)
    pictures = 2 * 3 * scene.image_size**2
    items = [
        MemoryItem("Python, torch and the rest of this process", 700 * MIB),
        MemoryItem("weights of the policy, on its device", weights),
        MemoryItem("the server that simulators are forked from", benchmark.server_mb * MIB),
        MemoryItem(
            "simulator processes, private memory of each", benchmark.simulator_mb * MIB, num_envs
        ),
        MemoryItem("images of the running episodes, at most", longest * pictures, num_envs),
    ]
    console.print(memory_table("Memory estimate", items, available_bytes()))
