"""SRPO on LIBERO: `python -m vla_rl.recipes.srpo_libero`.

Runs LIBERO tasks in simulator processes with a small OpenVLA-OFT policy, rewards each failure by
how near it came to the successes of the same update, and updates the policy. The run's folder holds
metrics, checkpoints, videos and a trace. `grpo_libero` and `ppo_libero` are this with other settings.
"""

import sys
from collections.abc import Sequence
from functools import partial
from typing import ClassVar, Final

import msgspec

from vla_rl.algorithms.losses import PolicyLossConfig
from vla_rl.cli.command_line import Command, TrainingLaunch
from vla_rl.cli.launch import run_recipe
from vla_rl.envs.libero.assets import Assets
from vla_rl.evaluation import embodied_agent_within_range, parse_numbers
from vla_rl.evaluation.scenes import (
    LiberoAssets,
    LiberoScene,
    Physics,
    assets_in_use,
    describe_other_images,
    resolve_checkpoint,
)
from vla_rl.evaluation.suites import LIBERO, Benchmark, SuiteTask
from vla_rl.learner import LearnerConfig, OptimizerConfig
from vla_rl.models.shipped import SHIPPED, is_base_policy
from vla_rl.pipelines.config import RunConfig
from vla_rl.recipes import suite_training
from vla_rl.recipes.held_out_starts import HeldOutStarts
from vla_rl.recipes.suite_training import SuiteTrainingConfig
from vla_rl.rollout import SchedulerConfig
from vla_rl.types import Agent, EnvSpec, PositiveFloat, PositiveInt

BASE_POLICY_STEP_LIMIT: Final = 160
"""Control steps. Only 2 of 212 greedy successes of the trained base policy took longer:
docs/pipelines/data/published_limits_evaluated.jsonl."""


class HeldOutConfig(HeldOutStarts, frozen=True, kw_only=True):
    """Greedy episodes on LIBERO before the first update and after the last, and beside training
    every few updates if wanted, from starts that are never trained on.
    """

    scene_seeds: str = "0"
    """Seeds of the positions of fixtures, such as 1-3. Every episode is run once for each seed."""

    physics: Physics = "exact"
    """Evaluations use exact."""


class SrpoLiberoConfig(SuiteTrainingConfig, frozen=True, kw_only=True):
    """SRPO on LIBERO's tasks; the defaults are for the small shipped policy."""

    benchmark: ClassVar[Benchmark] = LIBERO

    run: RunConfig = RunConfig(name="srpo_libero", updates=24)
    pipeline: str = "embodied_srpo"
    tasks: tuple[str, ...] = ("libero_object/1,6", "libero_goal/7")
    """Suites, such as libero_goal, or some of a suite's tasks by LIBERO's numbers, such as
    libero_goal/0-3,7."""

    group_size: PositiveInt = 8
    temperature: PositiveFloat = 0.3
    scheduler: SchedulerConfig = SchedulerConfig(groups_per_update=4, max_staleness=1)
    # With a constant learning rate, and steps of four episodes instead of eight, a task that was
    # nearly solved lost a quarter of its held-out starts in the last updates (docs/results.md).
    learner: LearnerConfig = LearnerConfig(
        optimizer=OptimizerConfig(lr=3e-4, warmup_steps=12, decay_steps="run"),
        loss=PolicyLossConfig(clip_low=0.2, clip_high=0.28),
        minibatch_trajectories=8,
    )

    physics: Physics = "fast"
    """Training uses fast, for several times as many control steps per second."""

    assets: LiberoAssets = None

    policy: str = SHIPPED
    """Folder or hub id of the checkpoint to start from: OpenVLA, OpenVLA-OFT, or a flow policy. shipped: the
    base policy of this package that was half trained on the assets in use, on the default tasks;
    shipped_flow: its flow policy, half trained on tasks 7 to 9 of libero_goal; shipped_goal: its policy for all
    ten."""

    held_out: HeldOutConfig = HeldOutConfig()

    @property
    def policy_folder(self) -> str:
        """Folder or hub id of the checkpoint that `policy` names."""
        return resolve_checkpoint(self.policy, self.assets)

    @property
    def scene(self) -> LiberoScene:
        """Conditions of the training episodes."""
        # failures run to the limit, so half of a training's control steps would go into the second
        # half of episodes that hardly ever succeed there
        shipped = BASE_POLICY_STEP_LIMIT if is_base_policy(self.policy) else None
        return LiberoScene.from_options(self, self.policy, self.step_limit or shipped)

    @property
    def held_out_scene(self) -> LiberoScene:
        """Conditions of the held-out episodes: those of an evaluation, with the same images."""
        wanted = self.held_out
        return msgspec.structs.replace(
            self.scene, physics=wanted.physics, step_limit=wanted.step_limit
        )

    @property
    def split_in_words(self) -> str:
        """How held-out episodes differ from those of training, besides their starts."""
        return f", scene seeds {self.held_out.scene_seeds}, {self.held_out.physics} physics"

    def held_out_envs(self, task: SuiteTask) -> Sequence[EnvSpec]:
        """Return the environment of a task with each of the held-out scene seeds."""
        scene = self.held_out_scene
        return [
            scene.make_env_spec(task.suite, task.task_id, scene_seed)
            for scene_seed in parse_numbers(
                self.held_out.scene_seeds, 1 << 31, "held_out.scene_seeds"
            )
        ]


async def main(
    command: Command[TrainingLaunch, SrpoLiberoConfig], agent: Agent = embodied_agent_within_range
) -> int:
    """Plan, draw or train, as the command line says; `agent` runs the training episodes."""
    config = command.config
    facts: dict[str, str] = {"physics": config.physics}
    # a drawing needs no assets, and a machine without LIBERO can make one
    if not command.launch.draw:
        assets = assets_in_use(config.scene.assets)
        print(f"LIBERO's assets: {assets.path} ({assets.source})", flush=True)
        _warn_of_other_images(config, assets)
        facts |= {"assets": assets.source, "assets_path": str(assets.path)}
    return await suite_training.main(command, facts, agent)


def _warn_of_other_images(config: SrpoLiberoConfig, assets: Assets) -> None:
    warning = describe_other_images(
        config.policy_folder, assets.source, config.scene.image_size, config.scene.quality
    )
    if warning is not None:
        print(warning, flush=True)


cli = partial(run_recipe, TrainingLaunch, SrpoLiberoConfig, main, __doc__ or "")


if __name__ == "__main__":
    sys.exit(cli())
