"""A planner and its robot learn in one run, or one of the two alone: all runs, one after the other.

    python -m benchmarks.planner_learning                      what is missing, in order
    python -m benchmarks.planner_learning --only both/0        one run
    python -m benchmarks.planner_learning --policy FOLDER      with another policy of the robot
    python -m benchmarks.planner_learning --table              what was kept

    both/0, /1, /2            planner and robot learn
    planner/0, /1, /2         the robot keeps its weights, and acts by the means of its tokens
    robot/0, /1, /2           the planner keeps its weights

Each run is `grpo_planner` with the shipped policy for libero_goal and the shipped planner, with as many episodes; their
control steps are kept, because a call ends when something new is true (those of the way home are not in it). Before the
first update and after the last, the same held-out requests are run from the same starts: 20 in words of no training
request, and 20 of combinations of skills that none asks for. A finished run is a line of `--keep`. A run that was
stopped goes on where it was, if the command is called again.

Keys of the last line, lists by run: `runs`, `before`, `after` in percent, `gain`, `env_steps`, `cpu_seconds`. And
`joint_minus_planner_only`, `joint_minus_vla_only`: points after training, with `_low` and `_high`, the 95 % interval
of the paired difference over requests and seeds (null before runs of the same seed have ended; the interval alone,
while too few requests ended otherwise for one); goal: the low end of the larger one above 0.
"""

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.flow_runs import join_outcomes, print_flow_runs, train_and_keep
from benchmarks.planned_runs import planned_command_line, run_missing
from benchmarks.srpo_vs_grpo.comparison import paired_bootstrap
from vla_rl.models.shipped import SHIPPED_GOAL

PLANNED: Final = [f"{who}/{seed}" for seed in range(3) for who in ("both", "planner", "robot")]
"""The three of a seed first, so that they can be compared before all have ended."""

GRPO: Final = (sys.executable, "-m", "vla_rl.recipes.grpo_planner")
OPTIONS: Final = (
    *("--run.updates", "12", "--scheduler.groups-per-update", "2"),
    *("--learner.epochs", "2", "--learner.minibatch-trajectories", "4"),
)
LIMIT_S: Final = 7200.0
"""CPU seconds after which a run is stopped."""


def run_planned(
    name: str, policy: str, root: Path, options: Sequence[str], keep_in: Path, note: str
) -> None:
    """Run what is missing of a run, and keep it.

    Raises: CalledProcessError if the command fails; CpuLimitExceeded; ValueError; OSError.
    """
    who, _, seed = name.partition("/")
    fresh = ("--learns", who, "--run.seed", seed, "--policy", policy, *OPTIONS, *options)
    train_and_keep(name, GRPO, fresh, root / name.replace("/", "_"), LIMIT_S, keep_in, note)


def compare_runs(
    lines: Sequence[dict[str, Any]], one: str, other: str
) -> tuple[float, float | None, float | None] | None:
    """Return how many points higher runs of one kind end, and the 95 % interval; None if no seed has both.

    Of a few differences too many resamples have none: the interval of the bootstrap is then infinite, and left out.
    """
    after = {line["run"]: join_outcomes(line, "after") for line in lines}
    differences = [
        100.0 * (int(mine) - int(theirs))
        for seed in range(3)
        if {f"{one}/{seed}", f"{other}/{seed}"} <= after.keys()
        for mine, theirs in zip(after[f"{one}/{seed}"], after[f"{other}/{seed}"], strict=True)
    ]
    if not differences:
        return None
    test = paired_bootstrap(differences)
    if not math.isfinite(test.low) or not math.isfinite(test.high):
        return round(test.mean, 1), None, None
    return round(test.mean, 1), round(test.low, 1), round(test.high, 1)


def print_kept(lines: list[dict[str, Any]]) -> None:
    """Print kept runs as a table, and their JSON line."""
    lines.sort(key=lambda line: PLANNED.index(line["run"]))
    compared = {
        f"joint_minus_{what}": compare_runs(lines, "both", who)
        for what, who in (("planner_only", "planner"), ("vla_only", "robot"))
    }
    print_flow_runs(
        lines,
        {
            f"{name}{end}": None if found is None else found[part]
            for name, found in compared.items()
            for part, end in enumerate(("", "_low", "_high"))
        },
    )


def main() -> int:
    """Run the command line; return the exit status."""
    parser = planned_command_line("planner_learning", __doc__, PLANNED)
    parser.add_argument(
        "--policy", default=SHIPPED_GOAL, help="the robot's policy; default: %(default)s"
    )
    parser.add_argument("options", nargs="*", help="after --: more options of grpo_planner")
    options = parser.parse_args()

    def run(name: str) -> None:
        given = (options.policy, options.runs, options.options, options.keep, options.note)
        run_planned(name, *given)

    return run_missing(options, PLANNED, run, print_kept)


if __name__ == "__main__":
    sys.exit(main())
