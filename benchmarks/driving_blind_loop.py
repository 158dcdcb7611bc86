"""The driving score of drivers that see nothing: `python -m benchmarks.driving_blind_loop`.

Each held-out drive of `srpo_driving_loop` is driven along its route towards the same speed,
whatever the image shows. A policy that drives along the route has to score more than the best of
these speeds to show that it sees.

`--compare docs/results/driving_closed_loop.jsonl` takes the runs that `driving_result` kept there,
and subtracts the best speed's score from theirs, drive by drive.

Prints a row a speed (m/s): the mean driving score as a share of 1, half of its 95 % interval, and
successes. The last line is JSON: `drives`; `best_speed` and `best_blind`, the speed with the highest
mean and that mean; with `--compare`, lists by run: `seed`, `updates`, `above_blind`, the mean
difference of a drive, and `above_blind_half`, half of its interval.
"""

import argparse
import sys
from pathlib import Path
from typing import Any, Final

import gymnasium
import numpy as np

import vla_rl.envs  # noqa: F401  # registers ours
from benchmarks.driving_blind import above_blind, steady
from benchmarks.driving_result import mean_of
from benchmarks.interleaved import print_json_line
from benchmarks.kept_runs import kept_lines
from vla_rl.envs.driving.closed_loop import GOAL
from vla_rl.envs.driving.roads import LAYOUTS

SPEEDS: Final = (3.0, 3.5, 4.0, 5.0, 7.0, 9.0, 12.0)
"""Speeds in m/s that a driver keeps. At 3 m/s the 60 m take the 20 s that a drive may last."""

ADAPTED_IN_S: Final = 1.5
"""Seconds in which the difference from the speed would be gone."""

FULL_PULL: Final = 4.0
"""Largest pull and brake, m/s^2."""


def pull_towards(speed: float, now: float) -> float:
    """Return the acceleration towards a speed, m/s^2."""
    return float(np.clip((speed - now) / ADAPTED_IN_S, -FULL_PULL, FULL_PULL))


def drive(env: Any, number: int, speed: float) -> tuple[float, bool]:
    """Return the driving score of a drive, a share of 1, and whether it was a success."""
    observation, _ = env.reset(options={"init_state_id": number})
    is_over = False
    while not is_over:
        for row in steady(pull_towards(speed, float(observation["state"][0]))):
            observation, _, terminated, truncated, info = env.step(row)
            is_over = terminated or truncated
            if is_over:
                break
    return float(info["score"]["total"]), bool(info["is_success"])


def main() -> int:
    """Drive at each speed and print the table; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--drives", type=int, default=300, help="held-out drives, from number 0 on")
    parser.add_argument("--compare", type=Path, help="file of kept runs to compare with")
    options = parser.parse_args()
    if options.drives < 1:
        parser.error(f"--drives is {options.drives}, expected at least 1")
    kept = [] if options.compare is None else kept_lines(options.compare)
    envs: list[Any] = [
        gymnasium.make(
            "vla_rl/driving_waypoints-v0",
            split="held_out",
            kind=kind,
            action="along_route",
            image_size=16,
        ).unwrapped
        for kind in LAYOUTS
    ]
    print(f"{options.drives} drives of {GOAL:.0f} m")
    scores: dict[float, list[float]] = {}
    for speed in SPEEDS:
        driven = [
            drive(envs[number % len(envs)], number, speed) for number in range(options.drives)
        ]
        scores[speed] = [score for score, _ in driven]
        mean, half = mean_of(scores[speed])
        successes = np.mean([is_success for _, is_success in driven])
        print(f"{speed:>6.1f}  {mean:.3f} ± {half:.3f}  successes {successes:.3f}", flush=True)
    best = max(scores, key=lambda speed: float(np.mean(scores[speed])))
    compared = above_blind(kept, scores[best], "driving_score")
    for seed, updates, mean, half in zip(*compared.values(), strict=True):
        print(f"seed {seed}, {updates} updates: {mean:+.3f} ± {half:.3f} above {best:g} m/s")
    print_json_line(
        {
            "drives": options.drives,
            "best_speed": best,
            "best_blind": mean_of(scores[best])[0],
            **(compared if kept else {}),
        }
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
