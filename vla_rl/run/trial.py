"""Trial of a policy that was just fine-tuned: a few greedy episodes, beside what the data solve.

A loss does not show whether a policy acts: the usual faults of fine-tuning (statistics of another
robot, a gripper with the other sign, another camera) leave it low and solve nothing. Twenty episodes
do, before days of reinforcement learning start from weights that never succeed.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from vla_rl.datasets import RecordedEpisode
from vla_rl.engines import EngineConfig
from vla_rl.env_workers import SimulatorConfig, SimulatorPool
from vla_rl.errors import ConfigError
from vla_rl.evaluation import run_each, wilson_interval, within_range
from vla_rl.evaluation.scenes import LiberoScene, MetaworldScene, Physics, Quality
from vla_rl.evaluation.suites import METAWORLD, get_benchmark, libero_episode, parse_tasks
from vla_rl.rollout import embodied_agent
from vla_rl.types import (
    Config,
    EnvSpec,
    EpisodeSpec,
    NonNegativeInt,
    PositiveInt,
    Sampling,
    Trajectory,
    derive_seed,
)

if TYPE_CHECKING:  # they import torch: `--help` and errors in options must not wait for it
    from vla_rl.engines import DeviceLane, PolicyModel

FIRST_DRAWN_START = 1000
"""Starts of a task from this number on are drawn; those below 50 are fixed in LIBERO."""


class TrialConfig(Config, frozen=True, kw_only=True):
    """Episodes that are run after the last update."""

    episodes: NonNegativeInt = 20
    """Number of episodes, shared among the tasks, from starts that the data do not have. 0: none."""

    tasks: tuple[str, ...] = ()
    """Tasks to run, such as libero_goal/7-9 or metaworld_mt10/reach. Empty: those that the data
    name, as recordings of `record_demonstrations` do."""

    env_id: str | None = None
    """Any other registered environment, such as vla_rl/toy_reach-v0, instead of tasks."""

    env_kwargs: dict[str, int | float | str] = msgspec.field(default_factory=dict)
    """Arguments of that environment."""

    num_envs: PositiveInt = 2
    """Simulators at the same time."""

    image_size: PositiveInt | None = None
    """Side of the images in pixels. None: that of the data, if they name it, else 256."""

    quality: Quality | None = None
    """Rendering quality. None: that of the data, if they name it, else exact."""

    physics: Physics = "fast"
    """fast is several times as quick as exact, and equal up to rounding."""

    seed: int = 0
    """Seed of the policy's noise."""

    def __post_init__(self) -> None:
        self.require(
            self.env_id is None or not self.tasks, "env_id", "none beside tasks: name one of them"
        )
        is_used = self.env_id is not None or not self.env_kwargs
        self.require(is_used, "env_kwargs", "none without env_id, whose arguments they are")


def plan_trial(
    config: TrialConfig, data: Sequence[RecordedEpisode], images: dict[str, Any] | None
) -> list[EpisodeSpec]:
    """Return the episodes of a trial; none if no environment is known.

    Args:
        config: the options.
        data: the demonstrations, whose tasks and starts count.
        images: `image_size`, `quality` and `assets` of the data, if they are known.

    Raises: ConfigError for tasks or an environment that do not exist.
    """
    if config.episodes == 0:
        return []
    if config.env_id is not None:
        return _plan_env(config, config.env_id, data)
    named = config.tasks or tuple(dict.fromkeys(_name_task(episode) for episode in data))
    tasks = parse_tasks([name for name in named if name], "trial.tasks")
    used = {(_name_task(episode), episode.about.get("init_state_id")) for episode in data}
    found: list[EpisodeSpec] = []
    for number, task in enumerate(tasks):
        share = len(range(number, config.episodes, len(tasks)))
        env = _make_env_spec(config, task.suite, task.task_id, images or {})
        starts = _list_free_starts(task.num_init_states, lambda start: (task.key, start) in used)  # noqa: B023
        found += [
            libero_episode(
                env,
                len(found) + index,
                task.key,
                start,
                sampling=Sampling(greedy=True),
                seed=config.seed,
            )
            for index, start in enumerate(itertools.islice(starts, share))
        ]
    return found


def _plan_env(
    config: TrialConfig, env_id: str, data: Sequence[RecordedEpisode]
) -> list[EpisodeSpec]:
    seeds = [derive_seed(config.seed, "trial", n) % 2**31 for n in range(config.episodes)]
    return [
        EpisodeSpec(
            episode_id=number,
            group_id=number,
            member=0,
            env=EnvSpec(id=env_id, kwargs=dict(config.env_kwargs)),
            task=env_id,
            seed=seed,
            policy_seed=seed,
            sampling=Sampling(greedy=True),
        )
        for number, seed in enumerate(seeds)
    ]


def _name_task(episode: RecordedEpisode) -> str:
    """Return the task of an episode if it names one of a suite, such as libero_goal/7, else ''."""
    task = episode.about.get("task")
    if not isinstance(task, str):
        return ""
    suite, _, number = task.partition("/")
    return task if number.isdigit() and suite in get_benchmark(suite).suites else ""


def _list_free_starts(num_fixed: int, is_used: Callable[[int], bool]) -> Iterator[int]:
    """Yield the starts that the data do not have: fixed ones, then drawn ones."""
    numbers = itertools.chain(range(num_fixed), itertools.count(FIRST_DRAWN_START))
    return (number for number in numbers if not is_used(number))


def _make_env_spec(
    config: TrialConfig, suite: str, task_id: int, images: dict[str, Any]
) -> EnvSpec:
    size = config.image_size or images.get("image_size") or 256
    quality = config.quality or images.get("quality") or "exact"
    if get_benchmark(suite) is METAWORLD:
        scene = MetaworldScene(image_size=size, quality=quality)
        return scene.make_env_spec(suite, task_id)
    libero = LiberoScene(
        image_size=size, quality=quality, physics=config.physics, assets=images.get("assets")
    )
    return libero.make_env_spec(suite, task_id)


async def run_trial(
    policy: "PolicyModel[Any]",
    lane: "DeviceLane",
    episodes: Sequence[EpisodeSpec],
    data: Sequence[RecordedEpisode],
    num_envs: int,
) -> float | None:
    """Run the episodes and print how many are solved, by task, beside the data's own share.

    Returns: the share of episodes that were solved; None if there is none to run.
    """
    if not episodes:
        print(
            "no episode is run: the data name no task, or trial.episodes is 0. Name the tasks "
            "(--trial.tasks libero_goal/7) or an environment (--trial.env-id)."
        )
        return None
    # not at the top: actors and torch take seconds to import
    from vla_rl.actors import Runtime
    from vla_rl.engines import TorchActionEngine

    solved: Counter[str] = Counter()

    async def done(trajectory: Trajectory) -> None:
        solved[trajectory.episode.task] += trajectory.is_success is True

    simulators = SimulatorConfig(num_envs=min(num_envs, len(episodes)), rss_limit_mb=4000)
    specs = list({str(episode.env): episode.env for episode in episodes}.values())
    async with (
        Runtime("trial") as runtime,
        SimulatorPool(runtime, simulators, specs=specs) as pool,
        TorchActionEngine(policy, lane, EngineConfig(max_batch=pool.num_envs)) as engine,
    ):
        await run_each(pool, engine, within_range(embodied_agent), episodes, done)
    planned = Counter(episode.task for episode in episodes)
    for task, number in planned.items():
        print(f"{task}: {solved[task]} of {number} episodes solved")
    total = solved.total()
    low, high = wilson_interval(total, len(episodes))
    print(
        f"the policy solves {total} of {len(episodes)} episodes ({total / len(episodes):.0%}, 95 % "
        f"interval {low:.0%} to {high:.0%}), from starts that the data do not have; "
        f"{_describe_data(data)}"
    )
    return total / len(episodes)


def _describe_data(data: Sequence[RecordedEpisode]) -> str:
    known = [episode.is_success for episode in data if episode.is_success is not None]
    if not known:
        return f"the {len(data)} demonstrations do not say whether they solve their task"
    return f"of the demonstrations {sum(known)} of {len(known)} do ({sum(known) / len(known):.0%})"


def require_env(config: TrialConfig) -> None:
    """Raise ConfigError if the named environment is not registered."""
    if config.env_id is None:
        return
    import gymnasium

    try:
        gymnasium.spec(config.env_id)
    except gymnasium.error.Error as error:
        raise ConfigError(f"trial.env_id is {config.env_id!r}: {error}") from error
