"""Measure the curves of docs/pipelines again.

    python -m benchmarks.pipeline_curves --pipelines grpo ppo --seeds 0 1 2 --out docs/pipelines/data

Runs the command on a pipeline's page, once a seed, and writes `<pipeline>.jsonl` with one line for
each seed and update. If the policy is evaluated before the first update and after the last, it also
writes `<pipeline>_evaluated.jsonl` with one line for each held-out episode, or each validation. Prints
the page's table: the mean over the seeds, and the lowest and highest of them. The last line is
JSON: for each pipeline its figure in the first and in the last update, its minutes, and the success
rate of the evaluated episodes before and after training, over the seeds.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from benchmarks.interleaved import print_json_line
from vla_rl.evaluation.record_file import read_records
from vla_rl.evaluation.records import SUCCESSES, VALIDATION
from vla_rl.evaluation.validation import read_validation
from vla_rl.reporting import read_metrics


class Curve(NamedTuple):
    """The run of a page's curve."""

    recipe: str
    options: tuple[str, ...]
    figure: str
    """Metric that the table shows, in percent."""


class Measured(NamedTuple):
    """The results of one run of a curve."""

    updates: list[dict[str, float]]
    evaluated: list[dict[str, Any]]
    seconds: float


CARTPOLE: Final = ("--chunk-size", "2", "--step-limit", "100", "--simulators.num-envs", "4")
WIDER_CLIP: Final = ("--learner.loss.clip-low", "0.02", "--learner.loss.clip-high", "0.03")
LIBERO: Final = ("--assets", "stand-ins")
SHORT: Final = (*LIBERO, "--run.updates", "12", "--held-out.init-states", "None")
STALENESS: Final = "--scheduler.max-staleness"

CURVES: Final = {
    "grpo": Curve(
        "train_toy", ("--pipeline", "grpo", "--run.updates", "15", *CARTPOLE), "reward/mean"
    ),
    "ppo": Curve(
        "train_toy", ("--pipeline", "ppo", "--run.updates", "15", *CARTPOLE), "reward/mean"
    ),
    "dapo": Curve(
        "train_toy", ("--pipeline", "dapo", "--run.updates", "8", *CARTPOLE), "reward/mean"
    ),
    "gspo": Curve(
        "train_toy",
        ("--pipeline", "gspo", "--run.updates", "12", *CARTPOLE, *WIDER_CLIP),
        "reward/mean",
    ),
    "cpgd": Curve(
        "train_toy", ("--pipeline", "cpgd", "--run.updates", "12", *CARTPOLE), "reward/mean"
    ),
    "embodied_srpo": Curve("srpo_libero", LIBERO, "rollout/success_rate"),
    "embodied_srpo_vllm": Curve(
        "srpo_libero", (*LIBERO, "--engine", "vllm"), "rollout/success_rate"
    ),
    "embodied_srpo_released": Curve(
        "srpo_libero", (*SHORT, "--srpo.rule", "released"), "rollout/success_rate"
    ),
    "embodied_srpo_synchronous": Curve(
        "srpo_libero", (*SHORT, STALENESS, "0"), "rollout/success_rate"
    ),
    "embodied_srpo_staleness_2": Curve(
        "srpo_libero", (*SHORT, STALENESS, "2"), "rollout/success_rate"
    ),
    "embodied_grpo": Curve("grpo_libero", SHORT, "rollout/success_rate"),
    "embodied_ppo": Curve("ppo_libero", LIBERO, "rollout/success_rate"),
    "text_grpo": Curve("grpo_text", (), "reward/mean"),
    "text_grpo_vllm": Curve("grpo_text", ("--engine", "vllm"), "reward/mean"),
    "text_ppo": Curve("grpo_text", ("--pipeline", "ppo"), "reward/mean"),
    "text_dapo": Curve("grpo_text", ("--pipeline", "dapo"), "reward/mean"),
    "text_gspo": Curve("grpo_text", ("--pipeline", "gspo", *WIDER_CLIP), "reward/mean"),
    "text_cpgd": Curve("grpo_text", ("--pipeline", "cpgd"), "reward/mean"),
}
"""The curves by pipeline. In CartPole, `reward/mean` is the share of its 100 steps that were
survived."""

LEASES: Final = "simulation/leases"
"""Metric of started episodes, with those of evaluations."""

KEPT: Final = (
    "reward/mean",
    "rollout/success_rate",
    "update/entropy",
    "update/kl_k3",
    "update/clip_fraction",
)
"""Metrics that are kept of an update, if it has them: an update that trained on nothing has no
entropy."""


def lines_of(run: Path, seed: int) -> list[dict[str, float]]:
    """Return a run's updates as lines of a page's data, with minutes since training started and, in
    simulators, episodes.
    """
    updates = read_metrics(run / "metrics.jsonl")
    began = updates[0]["wall_time_s"] - updates[0]["time/update_s"]
    num_before = count_first_evaluated(run)
    return [
        {
            "seed": seed,
            "update": line["update"],
            "minutes": round((line["wall_time_s"] - began) / 60, 2),
            **({"episodes": line[LEASES] - num_before} if LEASES in line else {}),
            **{name: round(line[name], 4) for name in line if name.startswith(KEPT)},
        }
        for line in updates
    ]


def count_first_evaluated(run: Path) -> int:
    """Return the number of held-out episodes that the run ran itself before its first update."""
    held_out = json.loads((run / "config.json").read_text()).get("held_out") or {}
    if held_out.get("first_results_of") is not None:
        return 0
    return sum(line["weight_version"] == 0 for line in evaluated_lines(run, 0))


def evaluated_lines(run: Path, seed: int) -> list[dict[str, Any]]:
    """Return the run's evaluations before its first update and after its last, as lines of a page's
    data.
    """
    episodes = [
        {
            "seed": seed,
            "weight_version": record.weights,
            "task": record.task,
            "init_state_id": record.start,
            "scene_seed": record.seed,
            "is_success": record.is_success,
            "num_steps": record.num_steps,
        }
        for record in read_records(run / SUCCESSES.file)
    ]
    validations = [
        {"seed": seed, "weight_version": weights, "metrics": metrics}
        for weights, metrics in read_validation(run / VALIDATION.file).items()
    ]
    return [*episodes, *validations]


def successes(lines: Sequence[dict[str, Any]]) -> list[float]:
    """Return the success rate of the evaluated episodes of each weight version."""
    found: dict[int, list[float]] = {}
    for line in lines:
        success = line["is_success"] if "is_success" in line else line["metrics"]["success"]
        found.setdefault(line["weight_version"], []).append(float(success))
    return [round(sum(each) / len(each), 4) for _, each in sorted(found.items())]


def measured(name: str, seed: int) -> Measured:
    """Run one curve with one seed. Raises: CalledProcessError if the run fails."""
    recipe, options, _ = CURVES[name]
    with tempfile.TemporaryDirectory() as root:
        command = [
            sys.executable,
            "-m",
            f"vla_rl.recipes.{recipe}",
            *options,
            "--run.seed",
            str(seed),
        ]
        began = time.perf_counter()
        subprocess.run([*command, "--run.root", root], check=True, stdout=sys.stderr)
        (run,) = Path(root).iterdir()
        return Measured(
            lines_of(run, seed), evaluated_lines(run, seed), time.perf_counter() - began
        )


def table(runs: Sequence[Sequence[dict[str, float]]], figure: str) -> str:
    """Return Markdown: for the first and every second update the mean over the runs in percent, and
    their range.
    """
    shown = [index for index in range(min(map(len, runs))) if index == 0 or index % 2 == 1]
    values = [[100 * run[index][figure] for run in runs] for index in shown]
    rows = [
        ["update", *(str(int(runs[0][index]["update"])) for index in shown)],
        ["---"] * (len(shown) + 1),
        ["mean", *(f"{sum(each) / len(each):.0f}" for each in values)],
    ]
    if len(runs) > 1:
        rows.append(
            ["lowest to highest", *(f"{min(each):.0f} to {max(each):.0f}" for each in values)]
        )
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main() -> None:
    """Run, write the lines, print the tables and the JSON line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pipelines", nargs="+", choices=list(CURVES), default=list(CURVES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument(
        "--out", type=Path, required=True, help="folder of the .jsonl files; created if missing"
    )
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    report: dict[str, object] = {}
    for name in options.pipelines:
        runs, figure = [measured(name, seed) for seed in options.seeds], CURVES[name].figure
        _write(options.out / f"{name}.jsonl", [line for run in runs for line in run.updates])
        print(f"{name}\n\n{table([run.updates for run in runs], figure)}\n", flush=True)
        report[f"{name}_first_update"] = [run.updates[0][figure] for run in runs]
        report[f"{name}_last_update"] = [run.updates[-1][figure] for run in runs]
        report[f"{name}_minutes"] = [round(run.seconds / 60, 1) for run in runs]
        if any(run.evaluated for run in runs):
            _write(
                options.out / f"{name}_evaluated.jsonl",
                [line for run in runs for line in run.evaluated],
            )
            report[f"{name}_evaluated"] = [successes(run.evaluated) for run in runs]
    print_json_line(report)


def _write(path: Path, lines: Sequence[object]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
