"""The score of plans that see nothing: `python -m benchmarks.driving_blind`.

Each held-out scene is driven along its route with the same steady pull or brake, whatever the
image shows; the scene's reference and IDM's fastest careful proposal are graded beside. A policy
that drives along the route has to score more than the best of these pulls to show that it sees.

`--compare docs/results/driving.jsonl` takes the runs that `driving_result` kept there and that were
rewarded by PDMS or by SRPO, and subtracts the best pull's score from theirs, scene by scene: the
interval of such a difference is smaller than the difference of two intervals.

Prints a row a pull (m/s^2): the mean PDMS and half of its 95 % interval over scenes. The last line
is JSON: `scenes`; `best_pull` and `best_blind`, the pull with the highest mean and that mean;
`careful` and `reference`, the means of the two planners; with `--compare`, lists by run: `seed`,
`updates`, `above_blind`, the mean difference of a scene, and `above_blind_half`, half of its
interval.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import gymnasium
import numpy as np

import vla_rl.envs  # noqa: F401  # registers ours
from benchmarks.driving_result import mean_of
from benchmarks.interleaved import print_json_line
from benchmarks.kept_runs import kept_lines
from vla_rl.envs.driving.plan_actions import AHEAD_SCALE, COSINES
from vla_rl.envs.driving.planner import FULL_SPEED

PULLS: Final = (0.5, 0.0, -0.25, -0.5, -0.75, -1.0, -1.25, -1.5, -2.0)
"""Accelerations in m/s^2, the same for all 4 s."""


def steady(pull: float) -> np.ndarray:
    """Return the plan of one acceleration in the middle of the lane: [8, 3]."""
    rows = np.zeros((8, 3))
    rows[0, 0] = pull / (AHEAD_SCALE[0] * COSINES[0, 0])
    return rows


def score_of(env: Any, number: int, rows: np.ndarray) -> float:
    """Return the score of a plan in a scene."""
    env.reset(options={"init_state_id": number})
    for row in rows:
        *_, info = env.step(row)
    return float(info["score"]["total"])


def above_blind(
    lines: Sequence[dict[str, Any]],
    blind: Sequence[float],
    version: str = "pdms_v1",
    rewards: Sequence[str] = ("total", "srpo"),
) -> dict[str, list[float]]:
    """Return how much the kept runs score above a blind plan, by run.

    Args:
        lines: kept runs.
        blind: the plan's score in each held-out scene, from number 0 on.
        version, rewards: score and rewards of the runs that are compared; others are left out.

    Raises: ValueError if a run was evaluated on more scenes.
    """
    found: dict[str, list[float]] = {
        name: [] for name in ("seed", "updates", "above_blind", "above_blind_half")
    }
    for line in lines:
        if line["version"] != version or line["reward"] not in rewards:
            continue
        totals = line["after"]["total"]
        if len(totals) > len(blind):
            raise ValueError(
                f"a kept run has {len(totals)} scenes, expected at most {len(blind)}; raise --scenes"
            )
        mean, half = mean_of((np.array(totals) - blind[: len(totals)]).tolist())
        figures = (line["seed"], line["updates"], mean, half)
        for values, figure in zip(found.values(), figures, strict=True):
            values.append(figure)
    return found


def main() -> int:
    """Grade the pulls and print the table; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scenes", type=int, default=500, help="held-out scenes, from number 0 on")
    parser.add_argument("--compare", type=Path, help="file of kept runs to compare with")
    options = parser.parse_args()
    if options.scenes < 1:
        parser.error(f"--scenes is {options.scenes}, expected at least 1")
    kept = [] if options.compare is None else kept_lines(options.compare)
    env: Any = gymnasium.make(
        "vla_rl/driving-v0",
        split="held_out",
        version="pdms_v1",
        action="along_route",
        image_size=16,
    ).unwrapped
    names = [f"{pull:+.2f}" for pull in PULLS]
    scores: dict[str, list[float]] = {name: [] for name in (*names, "careful", "reference")}
    for number in range(options.scenes):
        env.reset(options={"init_state_id": number})
        plans = {name: steady(pull) for name, pull in zip(names, PULLS, strict=True)}
        plans |= {"careful": env.proposed_actions(FULL_SPEED), "reference": env.expert_actions()}
        for name, rows in plans.items():
            scores[name].append(score_of(env, number, rows))
    means = {name: mean_of(values) for name, values in scores.items()}
    for name, (mean, half) in means.items():
        print(f"{name:>10}  {mean:.3f} ± {half:.3f}")
    best = max(names, key=lambda name: means[name][0])
    compared = above_blind(kept, scores[best])
    for seed, updates, mean, half in zip(*compared.values(), strict=True):
        print(f"seed {seed}, {updates} updates: {mean:+.3f} ± {half:.3f} above {best}")
    print_json_line(
        {
            "scenes": options.scenes,
            "best_pull": float(best),
            "best_blind": means[best][0],
            "careful": means["careful"][0],
            "reference": means["reference"][0],
            **(compared if kept else {}),
        }
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
