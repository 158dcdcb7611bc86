"""GRPO on the driving world: `python -m vla_rl.recipes.grpo_driving`.

One decision a scene: a plan of 4 s along the route, graded by PDMS (`--version epdms_v2`: by EPDMS).
Trajectories of a group share a scene, and each one's score is compared with the group's mean. Before
the first update and after the last, 500 held-out scenes are driven greedily, and every sub-score is
printed.
`--reward-of ego_progress` rewards progress alone, as a control;
`--reward-of ego_progress=5,lane_keeping=2` weighs sub-scores.
"""

import sys
from functools import partial
from typing import Annotated, get_args

import msgspec

from vla_rl.algorithms import AdvantageConfig
from vla_rl.algorithms.losses import PolicyLossConfig
from vla_rl.cli.command_line import TrainingLaunch
from vla_rl.cli.launch import run_recipe
from vla_rl.envs.driving.observing import ROUTE_POINTS
from vla_rl.envs.driving.plan_actions import PlanAction
from vla_rl.envs.driving.scores import Version
from vla_rl.learner import LearnerConfig, OptimizerConfig
from vla_rl.pipelines.config import RunConfig
from vla_rl.recipes.driving_training import (
    BY_GROUP_MEAN,
    CROP,
    DRIVING,
    IMAGE_SIZE,
    ROUTE_BASE,
    HeldOutScenesConfig,
    SceneTrainingConfig,
    main,
)
from vla_rl.rollout import SchedulerConfig
from vla_rl.types import EnvSpec, PositiveFloat, PositiveInt


class DrivingConfig(SceneTrainingConfig, frozen=True, kw_only=True):
    """Reinforcement learning on the driving world."""

    scenes: PositiveInt = 10_000
    """Training scenes, from number 0 on."""

    route_points: Annotated[int, msgspec.Meta(ge=0, le=ROUTE_POINTS)] = 0
    """Points of the route, every 5 m ahead, that the policy reads with the car's state, as
    it was trained with."""

    @property
    def task(self) -> str:
        """Name of the scenes in metrics and results."""
        return "driving"

    def env_of(self, split: str) -> EnvSpec:
        """Return the environment over `train` or `held_out`."""
        kwargs = {
            "split": split,
            "version": self.version,
            "reward": self.reward_of,
            "action": self.action,
            "image_size": IMAGE_SIZE,
            "crop": CROP,
            "route_points": self.route_points,
        }
        # held-out drives report the scores of the other versions too, which training need not
        # compute
        if split == "held_out":
            kwargs["also"] = [each for each in get_args(Version) if each != self.version]
        return EnvSpec(id=DRIVING, kwargs=kwargs)

    def num_scenes(self, split: str) -> int:
        """Return the number of scenes of `train` or `held_out` that are used."""
        wanted = self.held_out
        return self.scenes if split == "train" else wanted.scenes + wanted.num_choosing


class GrpoDrivingConfig(DrivingConfig, frozen=True, kw_only=True):
    """GRPO on the driving world; the defaults are for the shipped policy that drives along the
    route.
    """

    run: RunConfig = RunConfig(
        name="grpo_driving", updates=50, checkpoint_every=25, videos_every=50
    )
    pipeline: str = "embodied_grpo"
    advantage: AdvantageConfig = BY_GROUP_MEAN

    group_size: PositiveInt = 8
    temperature: PositiveFloat = 0.5
    scheduler: SchedulerConfig = SchedulerConfig(groups_per_update=32, max_staleness=1)
    learner: LearnerConfig = LearnerConfig(
        optimizer=OptimizerConfig(lr=3e-4, warmup_steps=10, decay_steps=50),
        loss=PolicyLossConfig(clip_low=0.2, clip_high=0.28),
        # A group shares its image, so all trajectories of an update are 32 rows of the network.
        micro_batch=256,
    )
    version: Version = "pdms_v1"
    action: PlanAction = "along_route"
    route_points: Annotated[int, msgspec.Meta(ge=0, le=ROUTE_POINTS)] = ROUTE_POINTS
    policy: str = str(ROUTE_BASE)
    held_out: HeldOutScenesConfig = HeldOutScenesConfig(by_mean=True)


cli = partial(run_recipe, TrainingLaunch, GrpoDrivingConfig, main, __doc__ or "")


if __name__ == "__main__":
    sys.exit(cli())
