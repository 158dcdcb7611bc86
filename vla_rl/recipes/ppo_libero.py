"""PPO on LIBERO: `python -m vla_rl.recipes.ppo_libero`.

The same episodes and policy as `srpo_libero`, with a critic on what the policy sees: every action chunk gets an advantage
of its own, and groups need not be mixed to teach.
"""

import sys

from vla_rl.algorithms import AdvantageConfig
from vla_rl.commands.command_line import TrainingLaunch, run_recipe
from vla_rl.pipelines.config import RunConfig
from vla_rl.recipes.libero_training import LiberoConfig, main
from vla_rl.rollout import SchedulerConfig


class PpoLiberoConfig(LiberoConfig, frozen=True, kw_only=True):
    """PPO on LIBERO."""

    run: RunConfig = RunConfig(name="ppo_libero", updates=12)
    pipeline: str = "embodied_ppo"
    advantage: AdvantageConfig = AdvantageConfig(name="gae")
    group_size: int = 1
    """Episodes from the same start; a critic compares them with its own expectation, so one is enough."""

    scheduler: SchedulerConfig = SchedulerConfig(groups_per_update=32, max_staleness=1)


def cli() -> int:
    """The command line."""
    return run_recipe(TrainingLaunch, PpoLiberoConfig, main, __doc__ or "")


if __name__ == "__main__":
    sys.exit(cli())
