"""The measured curves of docs/pipelines, again.

    python -m benchmarks.pipeline_curves --pipelines grpo ppo --seeds 0 1 2 --out docs/pipelines/data

Runs the command that a pipeline's page names, once a seed, and writes `<pipeline>.jsonl`: one line for each seed and update.
What it prints is the page's table: the mean over the seeds, and the lowest and highest of them. The last line is JSON: for
each pipeline its figure in the first and in the last update, over the seeds.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from benchmarks.interleaved import print_json_line
from vla_rl.observe import read_metrics


class Curve(NamedTuple):
    """What is run for a page's curve."""

    recipe: str
    options: tuple[str, ...]
    figure: str
    """Metric that the table shows, in percent."""


CARTPOLE: Final = ("--chunk-size", "2", "--step-limit", "100", "--simulators.num-envs", "4")
WIDER_CLIP: Final = ("--learner.loss.clip-low", "0.02", "--learner.loss.clip-high", "0.03")
SMALL_STEPS: Final = ("--learner.optimizer.lr", "3e-4", "--learner.minibatch-trajectories", "4")
LIBERO: Final = ("--step-limit", "200", "--simulators.num-envs", "3", "--assets", "stand-ins", *SMALL_STEPS)
HELD_OUT: Final = ("--held-out.init-states", "40-49", "--held-out.physics", "fast")
GROUPS: Final = ("--group-size", "8", "--scheduler.groups-per-update", "4")

CURVES: Final = {
    "grpo": Curve("train_toy", ("--pipeline", "grpo", "--run.updates", "15", *CARTPOLE), "reward/mean"),
    "ppo": Curve("train_toy", ("--pipeline", "ppo", "--run.updates", "15", *CARTPOLE), "reward/mean"),
    "dapo": Curve("train_toy", ("--pipeline", "dapo", "--run.updates", "8", *CARTPOLE), "reward/mean"),
    "gspo": Curve("train_toy", ("--pipeline", "gspo", "--run.updates", "12", *CARTPOLE, *WIDER_CLIP), "reward/mean"),
    "cpgd": Curve("train_toy", ("--pipeline", "cpgd", "--run.updates", "12", *CARTPOLE), "reward/mean"),
    "embodied_srpo": Curve("srpo_libero", ("--run.updates", "12", *LIBERO, *GROUPS, *HELD_OUT), "rollout/success_rate"),
    "embodied_grpo": Curve("grpo_libero", ("--run.updates", "12", *LIBERO, *GROUPS, *HELD_OUT), "rollout/success_rate"),
    "embodied_ppo": Curve(
        "ppo_libero",
        ("--run.updates", "8", *LIBERO, "--scheduler.groups-per-update", "32", *HELD_OUT),
        "rollout/success_rate",
    ),
}
"""Of CartPole, `reward/mean` is the share of its 100 steps that were survived."""

KEPT: Final = ("reward/mean", "rollout/success_rate", "update/entropy", "update/kl_k3", "update/clip_fraction")
"""What is kept of an update, where it says so: one that taught nothing has no entropy."""


def lines_of(run: Path, seed: int) -> list[dict[str, float]]:
    """A run's updates as lines of a page's data."""
    return [
        {"seed": seed, "update": line["update"], **{name: round(line[name], 4) for name in KEPT if name in line}}
        for line in read_metrics(run / "metrics.jsonl")
    ]


def curve(pipeline: str, seed: int) -> list[dict[str, float]]:
    """One run. Raises: CalledProcessError where it fails."""
    recipe, options, _ = CURVES[pipeline]
    with tempfile.TemporaryDirectory() as root:
        command = [sys.executable, "-m", f"vla_rl.recipes.{recipe}", *options, "--run.seed", str(seed)]
        subprocess.run([*command, "--run.root", root], check=True, stdout=sys.stderr)
        (run,) = Path(root).iterdir()
        return lines_of(run, seed)


def table(runs: Sequence[Sequence[dict[str, float]]], figure: str) -> str:
    """Markdown: for the first and every second update the mean over the runs in percent, and where they lie."""
    shown = [index for index in range(min(map(len, runs))) if index == 0 or index % 2 == 1]
    values = [[100 * run[index][figure] for run in runs] for index in shown]
    rows = [
        ["update", *(str(int(runs[0][index]["update"])) for index in shown)],
        ["---"] * (len(shown) + 1),
        ["mean", *(f"{sum(each) / len(each):.0f}" for each in values)],
    ]
    if len(runs) > 1:
        rows.append(["lowest to highest", *(f"{min(each):.0f} to {max(each):.0f}" for each in values)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main() -> None:
    """Run, write the lines, print the tables and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pipelines", nargs="+", choices=list(CURVES), default=list(CURVES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--out", type=Path, required=True, help="folder of the .jsonl files")
    options = parser.parse_args()
    report: dict[str, object] = {}
    for pipeline in options.pipelines:
        runs, figure = [curve(pipeline, seed) for seed in options.seeds], CURVES[pipeline].figure
        text = "\n".join(json.dumps(line) for run in runs for line in run)
        (options.out / f"{pipeline}.jsonl").write_text(text + "\n")
        print(f"{pipeline}\n\n{table(runs, figure)}\n", flush=True)
        report[f"{pipeline}_first_update"] = [run[0][figure] for run in runs]
        report[f"{pipeline}_last_update"] = [run[-1][figure] for run in runs]
    print_json_line(report)


if __name__ == "__main__":
    main()
