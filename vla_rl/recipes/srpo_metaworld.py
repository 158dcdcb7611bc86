"""SRPO on Meta-World: `python -m vla_rl.recipes.srpo_metaworld --policy base`.

The graph, reward and learner of `srpo_libero` on Meta-World's tasks. `record_demonstrations --suite
metaworld_mt10` and `sft_metaworld` make a policy to start from. `grpo_metaworld` is this with other
settings.
"""

import os
import sys
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Final

import msgspec

from vla_rl.algorithms.losses import PolicyLossConfig
from vla_rl.cli.command_line import TrainingLaunch
from vla_rl.cli.launch import run_recipe
from vla_rl.errors import ConfigError
from vla_rl.evaluation.scenes import ImageSize, MetaworldQuality, MetaworldScene, StepLimit
from vla_rl.evaluation.suites import METAWORLD, Benchmark
from vla_rl.learner import LearnerConfig, OptimizerConfig
from vla_rl.pipelines.config import RunConfig
from vla_rl.recipes.held_out_starts import HeldOutStarts
from vla_rl.recipes.suite_training import SuiteTrainingConfig, main
from vla_rl.rollout import SchedulerConfig
from vla_rl.types import PositiveFloat, PositiveInt

if TYPE_CHECKING:
    from vla_rl.models.robot_policy import RobotPolicy

BASE: Final = "base"


class SrpoMetaworldConfig(SuiteTrainingConfig, frozen=True, kw_only=True):
    """SRPO on Meta-World's tasks, from a policy of `sft_metaworld`."""

    benchmark: ClassVar[Benchmark] = METAWORLD

    run: RunConfig = RunConfig(name="srpo_metaworld", updates=20)
    pipeline: str = "embodied_srpo"
    tasks: tuple[str, ...] = ("metaworld_mt10/drawer-open,button-press-topdown,window-open",)
    """Suites, such as metaworld_mt10, or some of a suite's tasks by name or number, such as
    metaworld_mt50/drawer-open,3."""

    group_size: PositiveInt = 8
    temperature: PositiveFloat = 0.3
    scheduler: SchedulerConfig = SchedulerConfig(groups_per_update=4, max_staleness=1)
    # Of 60 held-out episodes, 20 succeeded before; after 8 updates, 18 with LIBERO's 3e-4 and 28 with
    # 1e-4.
    learner: LearnerConfig = LearnerConfig(
        optimizer=OptimizerConfig(lr=1e-4, warmup_steps=24),
        loss=PolicyLossConfig(clip_low=0.2, clip_high=0.28),
        minibatch_trajectories=4,
    )

    step_limit: StepLimit | None = 200
    """None: Meta-World's 500."""

    image_size: ImageSize = 84
    """Choose that of the policy's demonstrations."""

    quality: MetaworldQuality = "fast"

    policy: str = BASE
    """Folder or hub id of the OpenVLA or OpenVLA-OFT checkpoint to start from. Default: the folder
    that `sft_metaworld` writes."""

    held_out: HeldOutStarts = HeldOutStarts(init_states="40-49,1000-1023", step_limit=200)

    def load_starting_policy(self) -> "RobotPolicy":
        """Load the policy to train. Raises: ConfigError, also if the default was not made yet; CheckpointError."""
        if self.policy == BASE and not os.path.exists(BASE):
            raise ConfigError(
                f"policy is {BASE!r}, the default, and there is no such folder; make it by `vla-rl "
                "record_demonstrations --suite metaworld_mt10 --task-ids 4 6 8 --num 24 --image-size 84 "
                f"--quality fast --out demos` and `vla-rl sft_metaworld --demonstrations demos --out {BASE}`, "
                "or name another"
            )
        return super().load_starting_policy()

    @property
    def scene(self) -> MetaworldScene:
        """Conditions of the training episodes."""
        return MetaworldScene(
            image_size=self.image_size, step_limit=self.step_limit, quality=self.quality
        )

    @property
    def held_out_scene(self) -> MetaworldScene:
        """Conditions of the held-out episodes."""
        return msgspec.structs.replace(self.scene, step_limit=self.held_out.step_limit)


cli = partial(run_recipe, TrainingLaunch, SrpoMetaworldConfig, main, __doc__ or "")


if __name__ == "__main__":
    sys.exit(cli())
