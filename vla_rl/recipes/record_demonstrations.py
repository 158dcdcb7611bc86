"""Record demonstrations of LIBERO's scripted expert: `python -m vla_rl.recipes.record_demonstrations --out demos`.

One compressed `.npz` for each successful episode, `<out>/<suite>/<task_id>/<number>.npz`: image, wrist_image, state,
action (the expert's own), executed_action (with noise), one row for each control step, and the instruction.
Nothing is pickled: `numpy.load(path)` reads it.

To use several cores, start it several times with other `--task-ids`.
"""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
from rich.progress import Progress

from vla_rl.envs.libero import LiberoEnv, find_task
from vla_rl.envs.libero.demonstrations import record_demonstration
from vla_rl.errors import ConfigError
from vla_rl.recipes.command_line import Command, Launch, parse_command
from vla_rl.types import Config, derive_seed


class RecordConfig(Config, frozen=True, kw_only=True):
    """Which episodes to record, and how."""

    out: str = "demos"
    """Folder to write into."""

    suite: str = "libero_object"
    """Suite of the tasks; the scripted expert plays libero_object."""

    task_ids: tuple[int, ...] = (1,)
    """Which tasks of the suite."""

    num: int = 20
    """Successful episodes to record for each task."""

    num_init_states: int = 40
    """The first so many initial states are used, in turn; the rest stay unseen for evaluation."""

    noise: float = 0.25
    """Correlated noise on the executed actions, in units of a full command; the recorded actions stay clean."""

    image_size: int = 224
    """Height and width of the pictures, in pixels."""

    wrist_image: bool = True
    """Record the camera in the hand too; without it an episode takes two thirds of the time."""

    assets: str | None = None
    """Folder of LIBERO's assets; None for VLA_RL_LIBERO_ASSETS, the package's own or hf-libero's cache."""

    seed: int = 0
    """Seed of the noise."""

    def __post_init__(self) -> None:
        self.require(self.suite == "libero_object", "suite", "'libero_object', which the scripted expert plays")
        self.require(self.num >= 1, "num", ">= 1 episode")
        self.require(0.0 <= self.noise <= 1.0, "noise", "0 to 1 (a full command)")
        for task_id in self.task_ids:
            most = find_task(self.suite, task_id).num_init_states
            self.require(1 <= self.num_init_states <= most, "num_init_states", f"1 to {most}")


def folder_of(config: RecordConfig, task_id: int) -> Path:
    """Where the demonstrations of a task are."""
    return Path(config.out) / config.suite / str(task_id)


def record_task(config: RecordConfig, task_id: int, recorded: Callable[[], None] = lambda: None) -> int:
    """Record one task, calling `recorded` after each demonstration; returns how many episodes it took, failures included.

    Raises: `RuntimeError` if more than half of them failed, which no shipped task does.
    """
    folder = folder_of(config, task_id)
    env = LiberoEnv(config.suite, task_id, config.assets, image_size=config.image_size, wrist_image=config.wrist_image)
    num_recorded = num_played = 0
    try:
        while num_recorded < config.num:
            if num_played > 2 * config.num + 10:
                raise RuntimeError(
                    f"only {num_recorded} of {num_played} episodes of {env.task.key} succeeded; lower noise."
                )
            init_state_id = num_played % config.num_init_states
            seed = derive_seed(config.seed, task_id, num_played)
            demonstration = record_demonstration(env, init_state_id, config.noise, seed)
            num_played += 1
            if demonstration.is_success:
                demonstration.save(folder / f"{num_recorded:04d}.npz")
                num_recorded += 1
                recorded()
    finally:
        env.close()
    return num_played


def main(command: Command[Launch, RecordConfig]) -> int:
    """Record every task of the configuration, saying how it goes."""
    config = command.config
    print(f"{config.num} demonstrations of each of {config.suite}'s tasks {list(config.task_ids)}, into {config.out}")
    if command.launch.dry_run:
        return 0
    with Progress() as progress:
        for task_id in config.task_ids:
            bar = progress.add_task(f"{config.suite}/{task_id}", total=config.num)
            num_played = record_task(config, task_id, partial(progress.advance, bar))
            files = sorted(folder_of(config, task_id).glob("*.npz"))[: config.num]
            num_steps = sum(len(np.load(file)["action"]) for file in files)
            print(
                f"{config.suite}/{task_id}: {config.num} of {num_played} episodes recorded, {num_steps} control steps"
            )
    return 0


def cli() -> int:
    """The command line. No event loop: the expert plays in this process, and nothing else happens in it."""
    try:
        return main(parse_command(Launch, RecordConfig, __doc__ or ""))
    except (ConfigError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(cli())
