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
    ... ws://127.0.0.1:8000 --server.replan 5            a policy that an openpi server has, asked every 5 steps
    ... CHECKPOINT --record-to data                      also write every episode into a LeRobotDataset
"""

import sys
from collections.abc import Sequence
from functools import partial
from typing import Annotated, ClassVar

import msgspec
import tyro

from vla_rl.cli.evaluate import EvalLaunch, main
from vla_rl.cli.launch import run_recipe
from vla_rl.envs.libero.packages import find_other_libero
from vla_rl.evaluation.config import EvalConfig
from vla_rl.evaluation.scenes import (
    LiberoAssets,
    LiberoScene,
    Physics,
    Scenes,
    assets_in_use,
    resolve_checkpoint,
)
from vla_rl.evaluation.suites import (
    LIBERO,
    Benchmark,
    SuiteTask,
    list_suite_tasks,
    parse_numbers,
    parse_task_ids,
)
from vla_rl.evaluation.tables import kind_of_change
from vla_rl.models.shipped import SHIPPED
from vla_rl.types import EnvSpec


class EvalLiberoConfig(EvalConfig, frozen=True, kw_only=True):
    """The checkpoint, the episodes and the conditions of an evaluation on LIBERO."""

    benchmark: ClassVar[Benchmark] = LIBERO

    checkpoint: tyro.conf.Positional[str] = SHIPPED
    """Folder or hub id of a checkpoint, or the address of a policy server, ws://HOST:PORT. shipped: the
    base policy of this package that was trained on the assets in use; shipped_flow: its flow policy;
    shipped_goal: its policy for the ten tasks of libero_goal."""

    suites: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)] = ("libero_object",)
    """Suites of LIBERO, or, behind the package's name, of LIBERO-PRO and LIBERO-plus:
    liberopro.libero_goal_swap."""

    perturbations: tuple[str, ...] = ()
    """Kinds of change of LIBERO-PRO and LIBERO-plus to run, such as camera robot language noise; none
    stands for tasks as LIBERO has them. Default: all."""

    scene_seeds: str = "0"
    """Seeds of what initial states leave open, the positions of fixtures. Every episode is run once
    for each seed."""

    scenes: Scenes = "published"

    physics: Physics = "exact"

    assets: LiberoAssets = None

    def __post_init__(self) -> None:
        super().__post_init__()
        kinds = {
            kind_of_change(tasks[number])
            for suite in self.suites
            for tasks in [list_suite_tasks(suite, "suites")]
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
        return LiberoScene.from_options(self, self.checkpoint, self.step_limit, self.scenes)

    def envs_of(self, task: SuiteTask) -> Sequence[EnvSpec]:
        """Return the environment of a task with each of the scene seeds."""
        scene = self.scene
        return [
            scene.make_env_spec(task.suite, task.task_id, scene_seed)
            for scene_seed in parse_numbers(self.scene_seeds, 1 << 31, "scene_seeds")
        ]

    def found(self) -> dict[str, str]:
        """Return the assets that are found, and the LIBERO if it is another than the usual one.

        Raises: ConfigError without assets.
        """
        assets = assets_in_use(self.assets)
        found = {"assets": assets.source, "assets_path": str(assets.path)}
        # LIBERO-PRO and LIBERO-plus replace LIBERO's package: the same suite is then another
        # benchmark
        libero = find_other_libero()
        return found if libero is None else {**found, "libero": libero}

    def is_chosen(self, task: SuiteTask) -> bool:
        """Return whether the task's kind of change is one of `perturbations`."""
        return not self.perturbations or kind_of_change(task) in self.perturbations


cli = partial(run_recipe, EvalLaunch, EvalLiberoConfig, main, __doc__ or "")


if __name__ == "__main__":
    sys.exit(cli())
