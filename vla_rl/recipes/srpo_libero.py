"""SRPO on LIBERO: `python -m vla_rl.recipes.srpo_libero`.

Runs LIBERO tasks in simulator processes with a small OpenVLA-OFT policy, rewards each failure by
how near it came to the successes of the same update, and updates the policy. The run's folder holds
metrics, checkpoints, videos and a trace.
"""

import sys

from vla_rl.cli.command_line import TrainingLaunch, run_recipe
from vla_rl.pipelines.config import RunConfig
from vla_rl.recipes.libero_training import LiberoConfig, main


class SrpoLiberoConfig(LiberoConfig, frozen=True, kw_only=True):
    """SRPO on LIBERO."""

    run: RunConfig = RunConfig(name="srpo_libero", updates=26)


def cli() -> int:
    """Run the command line; return the exit status."""
    return run_recipe(TrainingLaunch, SrpoLiberoConfig, main, __doc__ or "")


if __name__ == "__main__":
    sys.exit(cli())
