"""GRPO on Meta-World: `python -m vla_rl.recipes.grpo_metaworld --policy base`.

The same episodes and policy as `srpo_metaworld`, but every failure earns 0. Groups in which all
episodes succeed or all fail have no learning signal, so they are replaced while the rollout
continues.
"""

import sys
from functools import partial

from vla_rl.cli.command_line import TrainingLaunch
from vla_rl.cli.launch import run_recipe
from vla_rl.pipelines.config import FilterConfig, RunConfig
from vla_rl.recipes.srpo_metaworld import SrpoMetaworldConfig
from vla_rl.recipes.suite_training import main


class GrpoMetaworldConfig(SrpoMetaworldConfig, frozen=True, kw_only=True):
    """GRPO on Meta-World: the settings of `SrpoMetaworldConfig`, and these."""

    run: RunConfig = RunConfig(name="grpo_metaworld", updates=12)
    pipeline: str = "embodied_grpo"
    filter: FilterConfig = FilterConfig(accuracy_bounds=(0.1, 0.9))


cli = partial(run_recipe, TrainingLaunch, GrpoMetaworldConfig, main, __doc__ or "")


if __name__ == "__main__":
    sys.exit(cli())
