"""Record demonstrations by the scripted experts for LIBERO and Meta-World:
`python -m vla_rl.recipes.record_demonstrations --out demos`.

Each successful episode becomes one compressed `.npz`, `<out>/<suite>/<task_id>/<number>.npz`:
image, wrist_image, state, action (the expert's own), executed_action (with noise), one row for each
control step, and the instruction. `numpy.load(path)` reads it; nothing is pickled.
`<task_id>.settings.json` beside a task's folder holds the settings of the recording; a later run
with other settings is rejected.

`--workers` records several tasks at the same time, in one process each.
"""

import asyncio
import contextlib
import itertools
import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Final

import msgspec
import numpy as np
from rich.progress import Progress

from vla_rl.cli.command_line import Command, Launch, parse_command
from vla_rl.cli.dry_run import open_each
from vla_rl.datasets import read_recording
from vla_rl.env_workers import SimulatorConfig
from vla_rl.envs import METAWORLD_SUITES
from vla_rl.envs.experts import Demonstration, record_demonstration
from vla_rl.envs.image_env import NUM_STARTS, ImageEnv
from vla_rl.envs.libero import LiberoEnv
from vla_rl.envs.libero.assets import Assets, find_assets
from vla_rl.envs.libero.tasks import SUITES
from vla_rl.envs.metaworld import MetaWorldEnv
from vla_rl.errors import ConfigError, StartError, VlaRlError
from vla_rl.evaluation.conditions import record_conditions, refuse_other_conditions
from vla_rl.evaluation.scenes import (
    ImageSize,
    LiberoAssets,
    LiberoQuality,
    LiberoScene,
    MetaworldScene,
    Physics,
)
from vla_rl.evaluation.suites import check_starts
from vla_rl.run.terminal import lasting_output
from vla_rl.types import Config, EnvSpec, NonNegativeInt, PositiveInt, Share, derive_seed
from vla_rl.util.ownership import name_lock_file, sole_owner
from vla_rl.util.processes import die_with_parent_only

_LIBERO_OPTIONS: Final = MappingProxyType(
    {"scene_seeds": (0,), "after_tasks": (), "assets": None, "physics": "fast"}
)
"""Options that Meta-World's suites do not have, with their defaults."""


class RecordConfig(Config, frozen=True, kw_only=True):
    """The episodes to record, and how to record them."""

    out: str = "demos"
    """Folder that the demonstrations are written to."""

    suite: str = "libero_object"
    """Suite of the tasks. The experts solve nearly all of libero_object, libero_spatial and
    libero_goal, most of libero_10 and libero_90, and nearly all of metaworld_mt10 and
    metaworld_mt50."""

    task_ids: Annotated[tuple[int, ...], msgspec.Meta(min_length=1)] = (1,)
    """Numbers of the suite's tasks to record."""

    init_state_ids: tuple[int, ...] | None = None
    """Initial states to start from, in turn. None: the first `num_init_states`."""

    scene_seeds: Annotated[tuple[NonNegativeInt, ...], msgspec.Meta(min_length=1)] = (0,)
    """Seeds of what initial states leave open, the positions of fixtures. Each gets an equal share
    of the demonstrations."""

    after_tasks: tuple[int, ...] = ()
    """Numbers of tasks in the same scene whose expert acts first, before the recording begins: starts in a
    scene that another skill has moved. Each but the recorded task itself gets an equal share of the
    demonstrations. Empty: nothing acts first."""

    num: PositiveInt = 20
    """Successful episodes to record for each task."""

    num_init_states: Annotated[int, msgspec.Meta(ge=1, lt=NUM_STARTS)] = 40
    """Number of initial states to use, in turn, from the first on; the rest stay unseen for
    evaluation."""

    noise: Share = 0.25
    """Correlated noise on the executed actions; 1 is a full command. The recorded `action` has
    none."""

    image_size: ImageSize = 224

    wrist_image: bool = True
    """Record the wrist camera too. Without it an episode takes two thirds of the time."""

    assets: LiberoAssets = None

    physics: Physics = "fast"
    """Training uses fast by default."""

    quality: LiberoQuality = "exact"
    """Evaluate a policy with the quality it was trained with."""

    seed: int = 0
    """Seed of the noise."""

    workers: PositiveInt = 1
    """Processes that record tasks at the same time."""

    def __post_init__(self) -> None:
        known = (*SUITES, *METAWORLD_SUITES)
        self.require(self.suite in known, "suite", f"one of {', '.join(known)}, which have experts")
        if self.suite in METAWORLD_SUITES:
            for name, default in _LIBERO_OPTIONS.items():
                self.require(
                    getattr(self, name) == default,
                    name,
                    f"{default}, the default: only LIBERO's suites have this option",
                )
        check_starts(self.suite, (*self.task_ids, *self.after_tasks), (0,))
        for task_id in self.task_ids:
            self.require(
                not self.after_tasks or set(self.after_tasks) != {task_id},
                "after_tasks",
                f"another task besides {task_id}, which is recorded",
            )
        chosen = self.init_state_ids
        is_known = chosen is None or (
            len(chosen) > 0 and min(chosen) >= 0 and max(chosen) < NUM_STARTS
        )
        self.require(
            is_known, "init_state_ids", f"numbers from 0 to {NUM_STARTS - 1}, at least one, or none"
        )

    @property
    def scene(self) -> LiberoScene | MetaworldScene:
        """Conditions of the environments."""
        if self.suite in METAWORLD_SUITES:
            return MetaworldScene(image_size=self.image_size, quality=self.quality)
        return LiberoScene.from_options(self)


def task_folder(config: RecordConfig, task_id: int) -> Path:
    """Return the folder of a task's demonstrations."""
    return Path(config.out) / config.suite / str(task_id)


def settings_path(config: RecordConfig, task_id: int) -> Path:
    """Return the file that holds the settings of a task's demonstrations."""
    folder = task_folder(config, task_id)
    return folder.with_name(f"{folder.name}.settings.json")


def check_settings(config: RecordConfig, assets: Assets | None) -> dict[str, Any]:
    """Check that every task's folder can take more demonstrations; return the settings to record
    with. Writes nothing.

    Raises: ConfigError if a folder holds demonstrations with other or unknown settings.
    """
    names = set(RecordConfig.__struct_fields__) - {
        "out",
        "suite",
        "task_ids",
        "num",
        "workers",
        "assets",
    }
    if assets is None:
        names -= set(_LIBERO_OPTIONS)
    settings = {name: getattr(config, name) for name in sorted(names)}
    if assets is not None:
        settings["assets"] = str(assets.path)
    if not config.after_tasks:  # recordings of earlier versions do not name them
        settings.pop("after_tasks", None)
    if (
        len(config.scene_seeds) > 1 or config.after_tasks
    ):  # the number decides how many each seed gets
        settings["num"] = config.num
    for task_id in config.task_ids:
        folder, record = task_folder(config, task_id), settings_path(config, task_id)
        if not record.exists() and any(folder.glob("*.npz")):
            raise ConfigError(
                f"{folder} holds demonstrations, but {record}, their settings, is missing; choose "
                "another folder (--out)"
            )
        refuse_other_conditions(record, settings)
    return settings


def write_settings(config: RecordConfig, assets: Assets | None) -> None:
    """Write the settings of the recording beside each task's folder. Raises: ConfigError as
    `check_settings` does, or if they cannot be written."""
    settings = check_settings(config, assets)
    for task_id in config.task_ids:
        folder, record = task_folder(config, task_id), settings_path(config, task_id)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            record_conditions(record, settings)
        except OSError as error:
            raise ConfigError(
                f"{record} cannot be written: {error}; choose another folder (--out), or make room"
            ) from error


def record_task(config: RecordConfig, task_id: int) -> int:
    """Record one task; return the number of episodes that were run, failures included.

    After another task fewer are recorded than asked for if its expert leaves the scene so that this one's fails.

    Raises: `RuntimeError` if more than half of the episodes failed and nothing acted before them.
    """
    num_run = num_recorded = 0
    others = tuple(each for each in config.after_tasks if each != task_id) or (None,)
    # each has its share, so that no position of the fixtures and no other task is seen more often
    conditions = list(itertools.product(config.scene_seeds, others))
    shares = np.array_split(np.arange(config.num), len(conditions))
    for (scene_seed, other), share in zip(conditions, shares, strict=True):
        if share.size == 0:
            continue
        most = 2 * config.num + 11 if other is None else num_run + 2 * share.size + 2
        last, obstacle = num_recorded + share.size, None
        env = _make_env(config, task_id, scene_seed, other)
        try:
            # a task that the expert does not solve must end; one that fails half of the time is still worth it
            while num_recorded < last and num_run < most:
                found = _record_episode(config, env, task_id, num_run)
                num_run += 1
                obstacle = found if isinstance(found, str) else found.obstacle
                if not isinstance(found, str) and found.is_success:
                    found.write_npz(task_folder(config, task_id) / f"{num_recorded:04d}.npz")
                    num_recorded += 1
        finally:
            env.close()
        if num_recorded < last:
            failure = (
                f"only {num_recorded} of {num_run} episodes of {env.task.key}"
                f"{'' if other is None else f', up to those after task {other},'} "
                f"succeeded: {obstacle or 'lower noise, or choose other tasks'}."
            )
            if other is None:
                raise RuntimeError(failure)
            print(failure, flush=True)
    return num_run


def _make_env(
    config: RecordConfig, task_id: int, scene_seed: int, other: int | None
) -> ImageEnv[Any]:
    kwargs = {"wrist_image": config.wrist_image, **config.scene.kwargs}
    if config.suite in METAWORLD_SUITES:
        return MetaWorldEnv(config.suite, task_id, **kwargs)
    if other is not None:
        # one scene for all that act first in it: building it takes seconds
        LiberoEnv.prepare(config.suite, task_id, scene_seed=scene_seed, **config.scene.kwargs)
    return LiberoEnv(config.suite, task_id, scene_seed=scene_seed, after_task=other, **kwargs)


def _env_spec(config: RecordConfig, task_id: int) -> EnvSpec:
    scene = config.scene
    if isinstance(scene, LiberoScene):
        return scene.make_env_spec(config.suite, task_id, config.scene_seeds[0])
    return scene.make_env_spec(config.suite, task_id)


def _record_episode(
    config: RecordConfig, env: ImageEnv[Any], task_id: int, number: int
) -> Demonstration | str:
    """Run the episode of this number, which determines its start and its noise; return why it has no start if the
    one that acts first fails."""
    starts = config.init_state_ids or tuple(range(config.num_init_states))
    seed = derive_seed(config.seed, task_id, number)
    try:
        return record_demonstration(env, starts[number % len(starts)], config.noise, seed)
    except StartError as error:
        return str(error)


def main(command: Command[Launch, RecordConfig]) -> int:
    """Record every task of the configuration and print the progress."""
    config = command.config
    print(
        f"{config.num} demonstrations of each of {config.suite}'s tasks "
        f"{list(config.task_ids)}, into {config.out}"
    )
    assets = None if config.suite in METAWORLD_SUITES else find_assets(config.assets)
    if command.launch.dry_run:
        check_settings(config, assets)
        asyncio.run(
            open_each(
                [_env_spec(config, task_id) for task_id in config.task_ids], SimulatorConfig()
            )
        )
        print("everything that the command would read was found")
        return 0
    with contextlib.ExitStack() as stack:
        for task_id in config.task_ids:
            folder = task_folder(config, task_id)
            folder.parent.mkdir(parents=True, exist_ok=True)
            # two commands into one folder would overwrite each other's episodes, number by number
            stack.enter_context(sole_owner(name_lock_file(folder), f"the folder {folder}"))
        write_settings(config, assets)
        _record_tasks(config)
    return 0


def _record_tasks(config: RecordConfig) -> None:
    # not forked: each worker renders, and must not share a graphics context with this process
    spawned = multiprocessing.get_context("spawn")
    with (
        ProcessPoolExecutor(
            config.workers,
            mp_context=spawned,
            # a worker looks for work only between tasks, which take minutes
            initializer=die_with_parent_only,
            initargs=(os.getpid(),),
        ) as processes,
        Progress() as progress,
    ):
        bar = progress.add_task(config.suite, total=len(config.task_ids))
        jobs = {
            processes.submit(record_task, config, task_id): task_id for task_id in config.task_ids
        }
        for job in as_completed(jobs):
            if job.exception() is not None:
                # running tasks finish, no other starts
                processes.shutdown(wait=False, cancel_futures=True)
            task_id, num_run = jobs[job], job.result()
            progress.advance(bar)
            files = sorted(task_folder(config, task_id).glob("*.npz"))[: config.num]
            num_steps = sum(read_recording(file).num_steps for file in files)
            print(
                f"{config.suite}/{task_id}: {len(files)} of {num_run} episodes recorded, "
                f"{num_steps} control steps"
            )


@lasting_output()
def cli() -> int:
    """Run the command line; return the exit status.

    Needs no event loop: it only waits for the recording processes.
    """
    try:
        return main(parse_command(Launch, RecordConfig, __doc__ or ""))
    except (VlaRlError, OSError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(cli())
