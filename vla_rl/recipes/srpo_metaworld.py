"""SRPO on Meta-World: `python -m vla_rl.recipes.srpo_metaworld --policy base`.

The graph, reward and learner of `srpo_libero` on Meta-World's tasks. `record_demonstrations --suite
metaworld_mt10` and `sft_metaworld` make a policy to start from.
"""

import sys

from vla_rl.cli.command_line import TrainingLaunch, run_recipe
from vla_rl.pipelines.config import RunConfig
from vla_rl.recipes.metaworld_training import MetaworldConfig
from vla_rl.recipes.suite_training import main


class SrpoMetaworldConfig(MetaworldConfig, frozen=True, kw_only=True):
    """SRPO on Meta-World."""

    run: RunConfig = RunConfig(name="srpo_metaworld", updates=20)


def cli() -> int:
    """Run the command line; return the exit status."""
    return run_recipe(TrainingLaunch, SrpoMetaworldConfig, main, __doc__ or "")


if __name__ == "__main__":
    sys.exit(cli())
