"""SRPO on the driving world: `python -m vla_rl.recipes.srpo_driving`.

One decision a scene: a plan of 4 s along the route. A plan is a success if its PDMS is at least
`--success-score`. Any other is rewarded by how near what the car sees at its end is to what it sees
at the ends of the successes in the same scene. Before the first update and after the last, 500
held-out scenes are driven, and every sub-score is printed.
`srpo_driving_loop` is SRPO on whole drives in closed loop.
"""

import sys
from collections.abc import Mapping
from functools import partial
from typing import Annotated

import msgspec

from vla_rl.algorithms import AdvantageConfig, EmbeddingConfig, SrpoConfig
from vla_rl.algorithms.losses import PolicyLossConfig
from vla_rl.cli.command_line import TrainingLaunch
from vla_rl.cli.launch import run_recipe
from vla_rl.envs.driving.observing import ROUTE_POINTS
from vla_rl.envs.driving.plan_actions import PlanAction
from vla_rl.envs.driving.scores import Version
from vla_rl.learner import LearnerConfig, OptimizerConfig
from vla_rl.pipelines.config import RunConfig
from vla_rl.pipelines.nodes.rewards import RewardConfig
from vla_rl.recipes.driving_training import BY_GROUP_MEAN, ROUTE_BASE, HeldOutScenesConfig, main
from vla_rl.recipes.grpo_driving import DrivingConfig
from vla_rl.rollout import SchedulerConfig
from vla_rl.types import EnvSpec, PositiveFloat, PositiveInt


class SrpoDrivingConfig(DrivingConfig, frozen=True, kw_only=True):
    """SRPO on the driving world; the defaults are for the shipped policy that drives along the
    route.
    """

    run: RunConfig = RunConfig(
        name="srpo_driving", updates=100, checkpoint_every=50, videos_every=100
    )
    pipeline: str = "embodied_srpo"
    reward: RewardConfig = RewardConfig()
    advantage: AdvantageConfig = BY_GROUP_MEAN
    # an episode has two observations, and all members of a group share the first
    embedding: EmbeddingConfig = EmbeddingConfig(num_frames=1)
    srpo: SrpoConfig = SrpoConfig(references="group", alpha=0.3)

    success_score: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.85
    """Least total of the score that makes a plan a success."""

    group_size: PositiveInt = 8
    temperature: PositiveFloat = 0.7
    scheduler: SchedulerConfig = SchedulerConfig(groups_per_update=32, max_staleness=1)
    learner: LearnerConfig = LearnerConfig(
        optimizer=OptimizerConfig(lr=3e-4, warmup_steps=10, decay_steps=100),
        loss=PolicyLossConfig(clip_low=0.2, clip_high=0.28),
        micro_batch=256,
    )
    version: Version = "pdms_v1"
    action: PlanAction = "along_route"
    route_points: Annotated[int, msgspec.Meta(ge=0, le=ROUTE_POINTS)] = ROUTE_POINTS
    policy: str = str(ROUTE_BASE)
    held_out: HeldOutScenesConfig = HeldOutScenesConfig(by_mean=True)

    def unused_options(self) -> Mapping[str, str]:
        """Return the options of rewards that are scores, if SRPO makes its own."""
        if self.pipeline != "embodied_srpo":
            return super().unused_options()
        # SRPO rewards successes, so no part of the score has a say in it
        return {**super().unused_options(), "reward_of": "srpo rewards successes"}

    def env_of(self, split: str) -> EnvSpec:
        """Return the environment over `train` or `held_out`."""
        env = super().env_of(split)
        return EnvSpec(id=env.id, kwargs={**env.kwargs, "success_score": self.success_score})


cli = partial(run_recipe, TrainingLaunch, SrpoDrivingConfig, main, __doc__ or "")


if __name__ == "__main__":
    sys.exit(cli())
