"""A head over the demo's frozen policy learns LIBERO's three tasks: all runs of the proof, one after the other.

    python -m benchmarks.off_policy_proof                            what is missing, in order
    python -m benchmarks.off_policy_proof --only dagger/0            one run
    python -m benchmarks.off_policy_proof --only dagger/0 -- --run.updates 1   with options of your own
    python -m benchmarks.off_policy_proof --table                    what was kept

    dagger/0, /1, /2      a scripted expert labels every decision and acts at three in ten; at most 30,000
                          control steps, those that it plans for a label included
    srpo/0, /1, /2        SRPO of all weights, as the demo runs it
    filtered_bc, td3_bc   a head learns from what the untrained policy has sampled, an episode from each training
                          start, and runs none itself; no expert, three seeds each
    td3_bc_alone, rlt     a head learns from its own episodes alone, from its start at the likeliest tokens; at
                          most 36,000 control steps
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

from benchmarks.counted_cpu import read_counted, run_counted
from benchmarks.flow_runs import join_outcomes, list_outcomes, train_and_keep
from benchmarks.interleaved import print_json_line
from benchmarks.kept_runs import about_run, keep, read_json
from benchmarks.planned_runs import (
    format_rate,
    percent,
    planned_command_line,
    print_rows,
    run_missing,
)
from benchmarks.srpo_vs_grpo.comparison import paired_bootstrap
from vla_rl.datasets.lerobot.layout import read_info
from vla_rl.evaluation.record_file import read_records
from vla_rl.reporting import RunDirectory

LIMIT_S: Final = 7200.0
"""CPU seconds after which a run is stopped."""

NUM_OFFLINE: Final = 3
"""Updates of a run that learns from samples."""

LAST: Final = f"checkpoints/update-{NUM_OFFLINE:06}/policy"
"""The policy of its last weights."""

SUITES: Final = {"libero_object": "1,6", "libero_goal": "7"}
"""The demo's tasks of each suite."""

NUMBERS: Final = "40-49,1000-1023"
STARTS: Final = ("--held-out.init-states", NUMBERS)
"""Held-out starts of each task, in no run's training."""

GREEDY: Final = ("--init-states", NUMBERS, "--quality", "fast")
"""Options of an evaluation on them."""


class Planned(NamedTuple):
    """A recipe with its options, and the untrained policy that it starts from."""

    recipe: str
    options: tuple[str, ...] = ()
    base: str = "token policy"
    learns_from_samples: bool = False
    """Whether it learns from episodes that the untrained policy has sampled, and from no others."""


def _learn_from_values(algorithm: str) -> Planned:
    # 20 updates of 16 episodes: those of a base that half fails take some 110 control steps
    options = ("--off-policy.algorithm", algorithm, "--run.updates", "20")
    return Planned("off_policy_libero", options)


def _learn_from_samples(*options: str) -> Planned:
    # a vector for each control step of the chunk, and corrections that reach every action
    head = ("--steering.features", "rows", "--steering.scale", "2.0")
    steps = ("--off-policy.offline-steps", "1000", "--run.updates", str(NUM_OFFLINE))
    return Planned("off_policy_libero", (*options, *head, *steps), learns_from_samples=True)


METHODS: Final = {
    # a head of this recipe begins at the means of the base's tokens, which solve more starts than the likeliest
    "dagger": Planned("dagger_libero", base="token policy by its means"),
    "srpo": Planned("srpo_libero", ("--run.updates", "26")),
    "filtered_bc": _learn_from_samples("--off-policy.algorithm", "filtered_bc"),
    # at 0.3 the critic's value costs starts
    "td3_bc": _learn_from_samples(
        *("--off-policy.algorithm", "td3_bc", "--off-policy.alpha", "0.05")
    ),
    "td3_bc_alone": _learn_from_values("td3_bc"),
    "rlt": _learn_from_values("rlt"),
    # 10 of these 26 updates have as many control steps
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
    command = (sys.executable, "-m", f"vla_rl.recipes.{planned.recipe}")
    train_and_keep(name, command, fresh, root / name.replace("/", "_"), LIMIT_S, keep_in, note)


def run_from_samples(
    name: str, root: Path, options: Sequence[str], keep_in: Path, note: str
) -> None:
    """Run what is missing of a run that learns from the untrained policy's samples alone, and keep it.

    Raises: as `run_planned`.
    """
    method, _, seed = name.partition("/")
    folder, sampled = root / name.replace("/", "_"), root / f"sampled_{seed}"
    counted, data = folder / "cpu_seconds", sampled / "data"
    folder.mkdir(parents=True, exist_ok=True)
    evaluate("shipped", root / "base", GREEDY, counted)
    samples = (
        *("--init-states", "0-39", "--step-limit", "160", "--physics", "fast"),
        *("--image-size", "84", "--temperature", "1.0", "--seed", seed),
        *("--videos", "none", "--record-to", str(data)),
    )
    evaluate("shipped", sampled, samples, counted)
    training = folder / "training"
    started = sorted(training.glob("*"))
    source = ("--run.seed", seed, "--replay.from", str(data), "--run.root", str(training))
    fresh = (*source, *METHODS[method].options, *options)
    if not (started and (started[-1] / LAST).exists()):
        command = (sys.executable, "-m", "vla_rl.recipes.off_policy_libero")
        chosen = ("--resume", str(started[-1])) if started else fresh
        run_counted((*command, *chosen), counted, LIMIT_S)
    (run,) = (RunDirectory.existing(path) for path in training.iterdir())
    seconds = evaluate(str(run.path / LAST), folder / "after", GREEDY, counted)
    config = read_json(run.config)
    line = {
        "run": name,
        "outcomes_before": read_outcomes(root / "base"),
        "outcomes_after": read_outcomes(folder / "after"),
        "env_steps": read_info(data).total_frames,
        "cpu_seconds": round(seconds),
        "settings": {part: config[part] for part in ("run", "off_policy", "steering", "replay")},
        **about_run(run, note),
    }
    keep(keep_in, line, lambda line: str(line["run"]))


def evaluate(policy: str, folder: Path, options: Sequence[str], counted: Path) -> float:
    """Run an episode of a policy from each start of the demo's tasks, and what is missing of a stopped evaluation;
    return the CPU seconds so far.

    Args:
        policy: the policy.
        folder: of the evaluations, one for each suite.
        options: the starts, and how it acts.
        counted: file that counts the CPU seconds.

    Raises: CalledProcessError if a command fails; CpuLimitExceeded; OSError.
    """
    for suite, tasks in SUITES.items():
        started = sorted((folder / suite).glob("*"))
        if started and (started[-1] / "results.json").exists():
            continue
        chosen = ("--suites", suite, "--tasks", tasks, "--scenes", "same", *options)
        fresh = (policy, *chosen, "--root", str(folder / suite))
        command = (sys.executable, "-m", "vla_rl.recipes.eval_libero")
        run_counted(
            (*command, *(("--resume", str(started[-1])) if started else fresh)), counted, LIMIT_S
        )
    return read_counted(counted)


def read_outcomes(folder: Path) -> dict[str, str]:
    """Return the outcomes of each task of `evaluate`, in the order of the starts."""
    files = sorted(folder.glob("*/*/episodes.jsonl"))
    return list_outcomes([record for file in files for record in read_records(file)])


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
        lambda name: (
            run_from_samples if METHODS[name.partition("/")[0]].learns_from_samples else run_planned
        )(name, options.runs, options.options, options.keep, options.note),
        print_kept,
    )


if __name__ == "__main__":
    sys.exit(main())
