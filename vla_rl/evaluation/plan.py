"""The plan of an evaluation: its episodes, their maximum lengths, and the memory that they need."""

from collections.abc import Sequence
from typing import Literal, Protocol

from rich.console import Console
from rich.table import Table

from vla_rl.envs.libero.tasks import step_limit_of
from vla_rl.envs.picture_env import NUM_STARTS
from vla_rl.errors import ConfigError
from vla_rl.evaluation.libero import (
    SERVER_MB,
    SIMULATOR_MB,
    libero_env,
    libero_episode,
    num_states_of,
    numbers_in,
    tasks_of,
)
from vla_rl.observe import MemoryItem, available_bytes, memory_table
from vla_rl.types import EpisodeSpec, Sampling

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
    def scene_seeds(self) -> str: ...
    @property
    def step_limit(self) -> int | None: ...
    @property
    def temperature(self) -> float | None: ...
    @property
    def picture_size(self) -> int: ...
    @property
    def physics(self) -> str: ...
    @property
    def pictures(self) -> str: ...
    @property
    def chosen_assets(self) -> str | None: ...
    @property
    def seed(self) -> int: ...


def planned_episodes(
    starts: Starts, scenes: Literal["same", "published"] = "same"
) -> list[EpisodeSpec]:
    """Return every task from every initial state with every scene seed, once.

    Args:
        starts: selection of the episodes, and their conditions.
        scenes: which of LIBERO's resets places the fixtures of an episode, as in `LiberoEnv`.

    Raises: ConfigError for a suite, a task or an initial state that does not exist.
    """
    greedy = starts.temperature is None
    sampling = Sampling(
        greedy=greedy, temperature=1.0 if starts.temperature is None else starts.temperature
    )
    episodes: list[EpisodeSpec] = []
    for suite in starts.suites:
        tasks = tasks_of(suite, "suites")
        for task_id in numbers_in(starts.tasks, len(tasks), f"tasks of {suite}"):
            task = tasks[task_id]
            for scene_seed in numbers_in(starts.scene_seeds, 1 << 31, "scene_seeds"):
                env = libero_env(
                    suite,
                    task_id,
                    assets=starts.chosen_assets,
                    image_size=starts.picture_size,
                    step_limit=starts.step_limit,
                    physics=starts.physics,
                    quality=starts.pictures,
                    scene_seed=scene_seed,
                    scenes=scenes,
                )
                what = f"init_states of {task.key}"
                for state in numbers_in(
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
        limit = starts.step_limit or step_limit_of(suite)
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
        f"physics {starts.physics}, quality {starts.pictures}"
    )
    longest = max((starts.step_limit or step_limit_of(suite)) for suite in starts.suites)
    pictures = 2 * 3 * starts.picture_size**2
    items = [
        MemoryItem("Python, torch and the rest of this process", 700 * MIB),
        MemoryItem("weights of the policy, on its device", weights),
        MemoryItem("the server that simulators are forked from", SERVER_MB * MIB),
        MemoryItem("simulator processes, private memory of each", SIMULATOR_MB * MIB, num_envs),
        MemoryItem("images of the running episodes, at most", longest * pictures, num_envs),
    ]
    console.print(memory_table("Memory estimate", items, available_bytes()))
