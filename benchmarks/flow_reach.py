"""A small flow policy learns the reaching task with images: all runs of the proof, one after the other.

    python -m benchmarks.flow_reach                      what is missing, in order
    python -m benchmarks.flow_reach --only ppo/0         one run
    python -m benchmarks.flow_reach --table              what was kept

    ppo/0, /1, /2         PPO with a critic on the observation alone, three seeds
    grpo/0, /1, /2        GRPO, eight episodes from each start
    nft/0, /1, /2         pi-StepNFT, eight episodes from each start

A seed's base comes from `sft_toy` with that seed. Each run evaluates the same 200 held-out starts before
the first update and after the last, greedily; they choose nothing. A finished run is a line of `--keep`,
with every outcome, its curve, control steps, CPU seconds (evaluations included), versions and machine. A
run that was stopped goes on where it was, if the command is called again.

Keys of the last line, lists by run: `runs`; `before`, `after`, `gain` in percent and points; `env_steps`;
`cpu_seconds`.
"""

import sys
from pathlib import Path
from typing import Final

from benchmarks.counted_cpu import run_counted
from benchmarks.flow_runs import print_flow_runs, train_and_keep
from benchmarks.planned_runs import planned_command_line, run_missing

LIMIT_S: Final = 1800.0
"""CPU seconds after which a run is stopped."""

RECIPES: Final = (sys.executable, "-m")
PLANNED: Final = [f"{name}/{seed}" for name in ("ppo", "grpo", "nft") for seed in range(3)]


def run_planned(name: str, root: Path, keep_in: Path, note: str) -> None:
    """Make a seed's base if it is missing, run what is missing of a run, and keep it.

    Raises: CalledProcessError if a command fails; CpuLimitExceeded; ValueError; OSError.
    """
    algorithm, _, seed = name.partition("/")
    base = root / f"base_{seed}"
    root.mkdir(parents=True, exist_ok=True)
    if not base.exists():
        sft = (*RECIPES, "vla_rl.recipes.sft_toy", "--seed", seed, "--out", str(base))
        run_counted(sft, root / f"base_{seed}_cpu_seconds", LIMIT_S)
    train = (*RECIPES, "vla_rl.recipes.train_toy")
    fresh = ("--config", f"reach_{algorithm}", "--policy", str(base), "--run.seed", seed)
    train_and_keep(name, train, fresh, root / name.replace("/", "_"), LIMIT_S, keep_in, note)


def main() -> int:
    """Run the command line; return the exit status."""
    options = planned_command_line("flow_reach", __doc__, PLANNED).parse_args()
    return run_missing(
        options,
        PLANNED,
        lambda name: run_planned(name, options.runs, options.keep, options.note),
        print_flow_runs,
    )


if __name__ == "__main__":
    sys.exit(main())
