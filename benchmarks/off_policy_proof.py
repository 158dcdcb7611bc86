"""A head over the demo's frozen policy learns LIBERO's three tasks: all runs of the proof, one after the other.

    python -m benchmarks.off_policy_proof                            what is missing, in order
    python -m benchmarks.off_policy_proof --only dagger/0            one run
    python -m benchmarks.off_policy_proof --only dagger/0 -- --run.updates 1   with options of your own
    python -m benchmarks.off_policy_proof --table                    what was kept

    dagger/0, /1, /2      a scripted expert labels every decision and acts at three in ten; at most 30,000
                          control steps, those that it plans for a label included
    srpo/0, /1, /2        SRPO of all weights, as the demo runs it
    td3_bc                a head learns from episodes that the untrained policy has sampled, and from some of its
                          own; no expert, at most 36,000 control steps
    td3_bc_alone, rlt     a head learns from its own episodes alone, from its start at the likeliest tokens
    srpo_short            SRPO at as many control steps as those
    dsrl                  the shipped flow policy, steered by its first noise, on its own tasks

Each run ends with 34 held-out starts of each task, greedily, with exact physics, LIBERO's step limit and the
last weights; they choose nothing. The first run of a base evaluates it on them too, and the others read its
result. A finished run is a line of `--keep`, with every outcome, its curve, CPU seconds (evaluations
included), versions, machine, and all control steps of its training episodes, those of the expert too. A run
that was stopped goes on where it was, if the command is called again.

Keys of the last line, lists by run: `runs`; `before`, `after`, `gain` in percent and points, with `gain_low`
and `gain_high`, the 95 % interval of the paired difference over the starts; `env_steps`; `cpu_seconds`.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from benchmarks.counted_cpu import run_counted
from benchmarks.flow_runs import join_outcomes, train_and_keep
from benchmarks.interleaved import print_json_line
from benchmarks.planned_runs import (
    format_rate,
    percent,
    planned_command_line,
    print_rows,
    run_missing,
)
from benchmarks.srpo_vs_grpo.comparison import paired_bootstrap

LIMIT_S: Final = 7200.0
"""CPU seconds after which a run is stopped."""

SAMPLED: Final = {"libero_object": "1,6", "libero_goal": "7"}
"""The demo's tasks by suite."""

STARTS: Final = ("--held-out.init-states", "40-49,1000-1023")
"""Held-out starts of each task, in no run's training."""


class Planned(NamedTuple):
    """A recipe with its options, and the untrained policy that it starts from."""

    recipe: str
    options: tuple[str, ...] = ()
    base: str = "token policy"
    samples_first: bool = False
    """Whether the untrained policy samples episodes first, with which the buffer begins."""


def _learn_from_values(algorithm: str) -> Planned:
    # 20 updates of 16 episodes: those of a base that half fails take some 110 control steps
    options = ("--off-policy.algorithm", algorithm, "--run.updates", "20")
    return Planned("off_policy_libero", options)


METHODS: Final = {
    # a head of this recipe begins at the means of the base's tokens, which solve more starts than the likeliest
    "dagger": Planned("dagger_libero", base="token policy by its means"),
    "srpo": Planned("srpo_libero"),
    "td3_bc": Planned(
        "off_policy_libero",
        (
            *(
                "--off-policy.algorithm",
                "td3_bc",
                "--off-policy.alpha",
                "0.3",
                "--run.updates",
                "2",
            ),
            *("--off-policy.updates-per-decision", "20", "--steering.std", "0.05"),
            # a vector for each control step of the chunk, and corrections that reach every action
            *("--steering.features", "rows", "--steering.scale", "2.0"),
        ),
        samples_first=True,
    ),
    "td3_bc_alone": _learn_from_values("td3_bc"),
    "rlt": _learn_from_values("rlt"),
    # 10 of the demo's 26 updates have as many control steps
    "srpo_short": Planned("srpo_libero", ("--run.updates", "10")),
    "dsrl": Planned(
        "off_policy_libero",
        (
            *("--policy", "shipped_flow", "--tasks", "libero_goal/7-9", "--run.updates", "12"),
            *("--steering.kind", "noise", "--steering.learns-std"),
            *("--off-policy.algorithm", "dsrl"),
            # ten critics and 20 steps a decision take hours of a core; at a temperature of 0.1 the noise grows
            # until success is lost, because returns differ by less
            *("--off-policy.critic.num", "2", "--off-policy.updates-per-decision", "5"),
            *("--off-policy.initial-temperature", "0.005", "--off-policy.first-rows", "500"),
        ),
        "flow policy",
    ),
}
PLANNED: Final = [f"{name}/{seed}" for name in METHODS for seed in range(3)]


def run_planned(name: str, root: Path, options: Sequence[str], keep_in: Path, note: str) -> None:
    """Run what is missing of a run, and keep it.

    Raises: CalledProcessError if the command fails; CpuLimitExceeded; ValueError; OSError.
    """
    method, _, seed = name.partition("/")
    planned = METHODS[method]
    fresh = ["--run.seed", seed, *STARTS, *planned.options, *options]
    same_base = [other for other in METHODS if METHODS[other].base == planned.base]
    ended = [
        path.parent for other in same_base for path in sorted(root.glob(f"{other}_?/*/report.html"))
    ]
    if ended:
        fresh += ["--held-out.first-results-of", str(ended[0])]
    folder = root / name.replace("/", "_")
    if planned.samples_first:
        sampled = root / f"sampled_{seed}"
        sample_base(sampled, seed, folder / "cpu_seconds")
        fresh += ["--replay.demonstrations", str(sampled / "data")]
    command = (sys.executable, "-m", f"vla_rl.recipes.{planned.recipe}")
    train_and_keep(name, command, fresh, folder, LIMIT_S, keep_in, note)


def sample_base(folder: Path, seed: str, counted: Path) -> None:
    """Record an episode of the untrained policy, by sampled tokens, from each training start; what is recorded
    already is not run again.

    Args:
        folder: the data set becomes its `data`.
        seed: of what is sampled.
        counted: file that counts the CPU seconds.

    Raises: CalledProcessError if a command fails; CpuLimitExceeded; OSError.
    """
    counted.parent.mkdir(parents=True, exist_ok=True)
    for suite, tasks in SAMPLED.items():
        evaluations = folder / suite
        begun = sorted(evaluations.glob("*"))
        options = (
            *(
                "shipped",
                "--suites",
                suite,
                "--tasks",
                tasks,
                "--init-states",
                "0-39",
                "--scenes",
                "same",
            ),
            *("--temperature", "1.0", "--seed", seed, "--physics", "fast", "--step-limit", "160"),
            *("--image-size", "84", "--videos", "none", "--record-to", str(folder / "data")),
            *("--root", str(evaluations)),
        )
        if begun:
            options = ("--resume", str(begun[-1]))
        if not (begun and (begun[-1] / "results.json").exists()):
            command = (sys.executable, "-m", "vla_rl.recipes.eval_libero", *options)
            run_counted(command, counted, LIMIT_S)


def compute_gain(line: dict[str, Any]) -> tuple[float, float, float]:
    """Return the points gained, with the 95 % interval of the paired difference over the starts."""
    pairs = zip(join_outcomes(line, "after"), join_outcomes(line, "before"), strict=True)
    test = paired_bootstrap([100.0 * (int(after) - int(before)) for after, before in pairs])
    return round(test.mean, 1), round(test.low, 1), round(test.high, 1)


def print_kept(lines: Sequence[dict[str, Any]]) -> None:
    """Print kept runs as a table, and their JSON line."""
    head = ["run", "control steps", "CPU seconds", "before, % (95 %)", "after, % (95 %)", "points"]
    gains = [compute_gain(line) for line in lines]
    rows = [
        [
            line["run"],
            f"{line['env_steps']:,}",
            f"{line['cpu_seconds']:,}",
            *(format_rate(join_outcomes(line, when), 0) for when in ("before", "after")),
            "{:+.0f} ({:+.0f} to {:+.0f})".format(*gain),
            ", ".join(
                f"{task} {line['outcomes_before'][task].count('1')} to {after.count('1')} of {len(after)}"
                for task, after in sorted(line["outcomes_after"].items())
            ),
        ]
        for line, gain in zip(lines, gains, strict=True)
    ]
    print_rows([*head, "by task"], rows)
    print_json_line(
        {
            "runs": [line["run"] for line in lines],
            **{
                when: [percent(join_outcomes(line, when)) for line in lines]
                for when in ("before", "after")
            },
            **{
                name: [gain[part] for gain in gains]
                for part, name in enumerate(("gain", "gain_low", "gain_high"))
            },
            **{name: [line[name] for line in lines] for name in ("env_steps", "cpu_seconds")},
        }
    )


def main() -> int:
    """Run the command line; return the exit status."""
    parser = planned_command_line("off_policy", __doc__, PLANNED)
    parser.add_argument("options", nargs="*", help="after --: more options of the recipe")
    options = parser.parse_args()
    return run_missing(
        options,
        PLANNED,
        lambda name: run_planned(name, options.runs, options.options, options.keep, options.note),
        print_kept,
    )


if __name__ == "__main__":
    sys.exit(main())
