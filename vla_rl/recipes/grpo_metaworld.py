"""GRPO on Meta-World: `python -m vla_rl.recipes.grpo_metaworld --policy base`.

The same episodes and policy as `srpo_metaworld`, but every failure earns 0. Groups in which all
episodes succeed or all fail have no learning signal, so they are replaced while the rollout
continues.
"""

import sys

from vla_rl.cli.command_line import TrainingLaunch
from vla_rl.cli.launch import run_recipe
from vla_rl.pipelines.config import FilterConfig, RunConfig
from vla_rl.recipes.srpo_metaworld import MetaworldConfig
from vla_rl.recipes.suite_training import main


class GrpoMetaworldConfig(MetaworldConfig, frozen=True, kw_only=True):
    """GRPO on Meta-World."""

    run: RunConfig = RunConfig(name="grpo_metaworld", updates=12)
    pipeline: str = "embodied_grpo"
    filter: FilterConfig = FilterConfig(accuracy_bounds=(0.1, 0.9))


def cli() -> int:
    """Run the command line; return the exit status."""
    return run_recipe(TrainingLaunch, GrpoMetaworldConfig, main, __doc__ or "")


if __name__ == "__main__":
    sys.exit(cli())
