"""A planner and a robot that learn in one run: credit in a small game, and what simulators wait for.

    python -m benchmarks.planner

Keys of the last line:
    small_game_right_vs_wrong_credit_updates   updates until 80 % of the episodes of `planner_game` are solved
                                               with `hierarchical_rloo`, over those with one advantage for all
                                               decisions of an episode (`rloo`), each at its best learning
                                               rate, mean of the seeds; goal <= 0.7
    small_game_at_equal_rates                  the largest of the same ratios at equal learning rates
    env_idle_while_planner_thinks              share of the time of 16 leased environments in which their
                                               episode waits for the planner (the one that ships, engine of
                                               torch); goal <= 0.2. Replies have at most 32 tokens, calls 100
                                               control steps. The environments take 15 ms for each, as LIBERO
                                               with small images does, and nothing of the processor
    skills_above_60, skills_above_60_after_another   of the skills that `benchmarks.planner_skills` has evaluated;
                                               null before it has; goal 10 each
"""

import argparse
import asyncio
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from benchmarks.interleaved import print_json_line, print_table
from benchmarks.kept_runs import kept_lines
from benchmarks.planner_game import Estimator, updates_needed
from benchmarks.planner_idle import measure_idle_share
from benchmarks.planner_skills import KEPT, summarise_skills
from vla_rl.algorithms import AdvantageConfig, advantage_estimator

CREDITS: Final = ("hierarchical_rloo", "rloo")
RATES: Final = (1.0, 2.0, 4.0, 8.0, 16.0)


def mean_updates(estimate: Estimator, rate: float, seeds: Sequence[int]) -> float:
    """Return the mean number of updates over the seeds."""
    return float(np.mean([updates_needed(estimate, seed, rate) for seed in seeds]))


def compare_credits(
    seeds: Sequence[int], rates: Sequence[float]
) -> Mapping[str, Mapping[float, float]]:
    """Return the mean updates of each estimator by learning rate."""
    return {
        name: {
            rate: mean_updates(advantage_estimator(AdvantageConfig(name=name)), rate, seeds)
            for rate in rates
        }
        for name in CREDITS
    }


def main() -> None:
    """Measure everything, and print tables and the line of figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=10, help="seeds of the small game")
    parser.add_argument("--episodes", type=int, default=16, help="episodes at the same time")
    wanted = parser.parse_args()
    found = compare_credits(range(wanted.seeds), RATES)
    right, wrong = (found[name] for name in CREDITS)
    for name, by_rate in found.items():
        print_table(f"updates by learning rate, {name}", {str(k): v for k, v in by_rate.items()})
    idle = asyncio.run(measure_idle_share(wanted.episodes))
    skills = summarise_skills(kept_lines(KEPT)) if KEPT.exists() else {}
    print_json_line(
        {
            "small_game_right_vs_wrong_credit_updates": min(right.values()) / min(wrong.values()),
            "small_game_at_equal_rates": max(right[rate] / wrong[rate] for rate in RATES),
            "env_idle_while_planner_thinks": idle,
            **{
                key: skills.get(key) for key in ("skills_above_60", "skills_above_60_after_another")
            },
        }
    )


if __name__ == "__main__":
    main()
