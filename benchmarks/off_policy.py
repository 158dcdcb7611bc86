"""Off-policy learning: correctness of its losses and heads, and of its replay buffer under faults.

    python -m benchmarks.off_policy                    every part
    python -m benchmarks.off_policy --parts faults --kills 200

Keys of the last line, by part:
    golden    golden_max_rel                  losses and gradients against other projects' code
    steered   off_equals_base_max_diff        a head that is off against its base
    faults    transitions_lost, transitions_doubled, samples_unequal_after_resume, damage_unnoticed
                                              a writer of a replay buffer that is killed at random moments, with full
                                              disks and damaged segments
    speed     append_mb_per_s_vs_plain_write  the same bytes written to plain files, one fsync each
              sample_rows_per_s_vs_numpy_take the same rows taken from one array, CPU seconds
    throughput throughput_with_learning_vs_acting, ...   as benchmarks.off_policy_throughput explains
"""

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import uvloop

from benchmarks.interleaved import print_json_line


def measure_golden(options: argparse.Namespace) -> dict[str, Any]:
    """Compare losses and gradients with golden numbers."""
    from benchmarks.off_policy_golden import golden_max_rel

    return {"golden_max_rel": golden_max_rel()}


def measure_steered(options: argparse.Namespace) -> dict[str, Any]:
    """Compare heads that are off with their bases."""
    from benchmarks.steered_policies import measure_off_difference

    return dict(measure_off_difference())


def measure_faults(options: argparse.Namespace) -> dict[str, Any]:
    """Kill a writer of a replay buffer at random moments."""
    from benchmarks.replay_faults import run_campaign

    with tempfile.TemporaryDirectory(prefix="vla-rl-replay-") as folder:
        return dict(run_campaign(Path(folder) / "campaign", options.kills, options.seed))


def measure_speed(options: argparse.Namespace) -> dict[str, Any]:
    """Measure appends and samples of a replay buffer against plain files and NumPy."""
    from benchmarks.replay_speed import measure_appends, measure_samples

    with tempfile.TemporaryDirectory(prefix="vla-rl-replay-") as folder:
        appends = measure_appends(Path(folder) / "appends", options.rounds)
    with tempfile.TemporaryDirectory(prefix="vla-rl-replay-") as folder:
        return {**appends, **measure_samples(Path(folder) / "samples", options.rounds)}


def measure_throughput(options: argparse.Namespace) -> dict[str, Any]:
    """Compare decisions per second of robots while a head learns with those without learning."""
    from benchmarks import off_policy_throughput as throughput

    measured = throughput.throughput_with_learning_vs_acting(throughput.parse_arguments([]))
    return dict(uvloop.run(measured))


PARTS: Final[dict[str, Callable[[argparse.Namespace], dict[str, Any]]]] = {
    "golden": measure_golden,
    "steered": measure_steered,
    "faults": measure_faults,
    "speed": measure_speed,
    "throughput": measure_throughput,
}


def main() -> int:
    """Run the parts, and print their figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--kills", type=int, default=200, help="SIGKILLs of the part `faults`")
    parser.add_argument("--rounds", type=int, default=9, help="rounds of the part `speed`")
    parser.add_argument("--seed", type=int, default=7, help="seed of the part `faults`")
    options = parser.parse_args()
    figures: dict[str, Any] = {}
    for name in options.parts:
        figures |= PARTS[name](options)
    print_json_line(figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
