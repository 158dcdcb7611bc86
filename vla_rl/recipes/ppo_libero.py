"""PPO on LIBERO: `python -m vla_rl.recipes.ppo_libero`.

The same episodes and policy as `srpo_libero`, with a critic on the policy's observations: every
action chunk gets its own advantage, and a group need not mix successes and failures to give a
learning signal.
"""

import sys

from vla_rl.algorithms import AdvantageConfig
from vla_rl.cli.command_line import TrainingLaunch
from vla_rl.cli.launch import run_recipe
from vla_rl.pipelines.config import RunConfig
from vla_rl.recipes.srpo_libero import LiberoConfig, main
from vla_rl.rollout import SchedulerConfig


class PpoLiberoConfig(LiberoConfig, frozen=True, kw_only=True):
    """PPO on LIBERO."""

    run: RunConfig = RunConfig(name="ppo_libero", updates=12)
    pipeline: str = "embodied_ppo"
    advantage: AdvantageConfig = AdvantageConfig(name="gae")
    group_size: int = 1
    """Episodes from each start. One is enough, because the critic's estimate is the baseline."""

    scheduler: SchedulerConfig = SchedulerConfig(groups_per_update=32, max_staleness=1)


def cli() -> int:
    """Run the command line; return the exit status."""
    return run_recipe(TrainingLaunch, PpoLiberoConfig, main, __doc__ or "")


if __name__ == "__main__":
    sys.exit(cli())
