"""PPO on LIBERO: `python -m vla_rl.recipes.ppo_libero`.

The same episodes and policy as `srpo_libero`, with a critic on the policy's observations: every
action chunk gets its own advantage, and a group need not mix successes and failures to give a
learning signal.
"""

import sys
from functools import partial

from vla_rl.algorithms import AdvantageConfig
from vla_rl.algorithms.losses import PolicyLossConfig
from vla_rl.cli.command_line import TrainingLaunch
from vla_rl.cli.launch import run_recipe
from vla_rl.learner import LearnerConfig, OptimizerConfig
from vla_rl.pipelines.config import RunConfig
from vla_rl.recipes.srpo_libero import SrpoLiberoConfig, main
from vla_rl.rollout import SchedulerConfig
from vla_rl.types import PositiveInt


class PpoLiberoConfig(SrpoLiberoConfig, frozen=True, kw_only=True):
    """PPO on LIBERO: the settings of `SrpoLiberoConfig`, and these."""

    run: RunConfig = RunConfig(name="ppo_libero", updates=12)
    pipeline: str = "embodied_ppo"
    advantage: AdvantageConfig = AdvantageConfig(name="gae")
    group_size: PositiveInt = 1
    """Episodes from each start. One is enough, because the critic's estimate is the baseline."""

    scheduler: SchedulerConfig = SchedulerConfig(groups_per_update=32, max_staleness=1)
    learner: LearnerConfig = LearnerConfig(
        optimizer=OptimizerConfig(lr=3e-4, warmup_steps=12, decay_steps="run"),
        loss=PolicyLossConfig(clip_low=0.2, clip_high=0.28),
        aggregation="token_mean",
        minibatch_trajectories=8,
    )


cli = partial(run_recipe, TrainingLaunch, PpoLiberoConfig, main, __doc__ or "")


if __name__ == "__main__":
    sys.exit(cli())
