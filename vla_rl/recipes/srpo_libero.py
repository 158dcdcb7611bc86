"""SRPO on LIBERO: `python -m vla_rl.recipes.srpo_libero`.

Plays LIBERO tasks in simulator processes with a small OpenVLA-OFT policy, rewards failures by how near they came to the
successes of the same update, and updates the policy. Metrics, checkpoints, videos and a trace are left in the run's folder.
"""

import sys

from vla_rl.commands.command_line import TrainingLaunch, run_recipe
from vla_rl.pipelines.config import RunConfig
from vla_rl.recipes.libero_training import LiberoConfig, main


class SrpoLiberoConfig(LiberoConfig, frozen=True, kw_only=True):
    """SRPO on LIBERO."""

    run: RunConfig = RunConfig(name="srpo_libero", updates=20)


def cli() -> int:
    """The command line."""
    return run_recipe(TrainingLaunch, SrpoLiberoConfig, main, __doc__ or "")


if __name__ == "__main__":
    sys.exit(cli())
