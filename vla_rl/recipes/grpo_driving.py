"""GRPO on the driving world: `python -m vla_rl.recipes.grpo_driving`.

One decision a scene: a plan of 4 s, graded by EPDMS (`--version pdms_v1`: by PDMS). Trajectories of
a group share a scene, and each one's score is compared with the group's mean. Before the first
update and after the last, 500 held-out scenes are driven greedily, and every sub-score is printed.
`--reward-of ego_progress` rewards progress alone, as a control;
`--reward-of ego_progress=5,lane_keeping=2` weighs sub-scores.
"""

import sys

from vla_rl.algorithms import AdvantageConfig
from vla_rl.commands.command_line import TrainingLaunch, run_recipe
from vla_rl.pipelines.config import RunConfig
from vla_rl.recipes.driving_training import BY_GROUP_MEAN, DrivingConfig, main


class GrpoDrivingConfig(DrivingConfig, frozen=True, kw_only=True):
    """GRPO on the driving world."""

    run: RunConfig = RunConfig(
        name="grpo_driving", updates=300, checkpoint_every=50, videos_every=300
    )
    pipeline: str = "embodied_grpo"
    advantage: AdvantageConfig = BY_GROUP_MEAN


def cli() -> int:
    """Run the command line; return the exit status."""
    return run_recipe(TrainingLaunch, GrpoDrivingConfig, main, __doc__ or "")


if __name__ == "__main__":
    sys.exit(cli())
