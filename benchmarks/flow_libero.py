"""The shipped flow policy learns three tasks of LIBERO on two cores: all runs of the proof, one after the other.

    python -m benchmarks.flow_libero                                   what is missing, in order
    python -m benchmarks.flow_libero --only ppo/0                      one run
    python -m benchmarks.flow_libero --only ppo/0 -- --run.updates 1   with options of your own
    python -m benchmarks.flow_libero --table                           what was kept

    ppo/0, /1, /2         PPO with a critic on the observation alone, three seeds
    nft/0, /1, /2         pi-StepNFT, eight episodes from each start
    grpo/0, /1, /2        GRPO, eight episodes from each start
    srpo/0, /1, /2        SRPO: failures are rewarded by how near they came to successes

All have the settings of `recipes/configs/libero_flow_*.toml`. Each run ends with 34 held-out starts of each
task, greedily, with exact physics, LIBERO's step limit and the last weights; they choose nothing. The first run
also evaluates the base on them, and the others read its result. A finished run is a line of `--keep`, with
every outcome, its curve, control steps, CPU seconds (evaluations included), the seconds of acting and
updates, versions and machine. A run that was stopped goes on where it was, if the command is called again.

Keys of the last line, lists by run: `runs`; `before`, `after`, `gain` in percent and points; `env_steps`;
`cpu_seconds`.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from benchmarks.flow_runs import print_flow_runs, train_and_keep
from benchmarks.planned_runs import planned_command_line, run_missing

LIMIT_S: Final = 4800.0
"""CPU seconds after which a run is stopped: twice those of 20 minutes of two cores."""

RECIPES: Final = {
    "ppo": "ppo_libero",
    "nft": "grpo_libero",
    "grpo": "grpo_libero",
    "srpo": "srpo_libero",
}
PLANNED: Final = [f"{name}/{seed}" for seed in range(3) for name in RECIPES]


def run_planned(name: str, root: Path, options: Sequence[str], keep_in: Path, note: str) -> None:
    """Run what is missing of a run, and keep it.

    Raises: CalledProcessError if the command fails; CpuLimitExceeded; ValueError; OSError.
    """
    algorithm, _, seed = name.partition("/")
    fresh = ["--config", f"libero_flow_{algorithm}", "--run.seed", seed, *options]
    # the base and its starts are the same in all runs
    ended = [path.parent for path in sorted(root.glob("*/*/report.html"))]
    if ended:
        fresh += ["--held-out.first-results-of", str(ended[0])]
    command = (sys.executable, "-m", f"vla_rl.recipes.{RECIPES[algorithm]}")
    train_and_keep(name, command, fresh, root / name.replace("/", "_"), LIMIT_S, keep_in, note)


def main() -> int:
    """Run the command line; return the exit status."""
    parser = planned_command_line("flow_libero", __doc__, PLANNED)
    parser.add_argument("options", nargs="*", help="after --: more options of the recipe")
    options = parser.parse_args()
    return run_missing(
        options,
        PLANNED,
        lambda name: run_planned(name, options.runs, options.options, options.keep, options.note),
        print_flow_runs,
    )


if __name__ == "__main__":
    sys.exit(main())
