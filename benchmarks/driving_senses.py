"""The senses that a policy along the route plans by: `python -m benchmarks.driving_senses FOLDER`.

Each held-out scene is driven three times: as it is, with another scene's image, and with another
scene's motion (speed, accelerations, yaw rate, steering and command; the route stays). The other
scene is the seventh after it. What the score loses is what that sense is worth to the policy; a
policy that loses nothing with another image does not react to others, whom it knows from nothing
else.

Plans are by the mean of each number, as `grpo_driving`'s held-out ones. Prints a row a case: PDMS, and
the mean difference of a scene from the first row, with halves of 95 % intervals. The last line is
JSON: `scenes`; `own`; `other_image` and `other_motion`, the differences, and their `_half`.
"""

import argparse
import sys
from typing import Any, Final

import gymnasium
import numpy as np

import vla_rl.envs  # noqa: F401  # registers ours
from benchmarks.driving_blind import score_of
from benchmarks.driving_result import mean_of
from benchmarks.interleaved import print_json_line
from vla_rl.envs.driving.observing import ROUTE_POINTS, STATE_SIZE
from vla_rl.recipes.driving_training import FORMAT, load_driver
from vla_rl.recipes.grpo_driving import GrpoDrivingConfig
from vla_rl.types import Observation, Sampling

NEXT: Final = 7
"""Scenes from one to the other whose senses it gets."""


def with_other_image(own: Observation, other: Observation) -> Observation:
    """Return the observation with the other's image."""
    return {**own, "image": other["image"]}


def with_other_motion(own: Observation, other: Observation) -> Observation:
    """Return the observation with the other's motion and command, and its own route."""
    state = np.concatenate([other["state"][:STATE_SIZE], own["state"][STATE_SIZE:]])
    return {**own, "state": state, "instruction": other["instruction"]}


def main() -> int:
    """Drive the scenes and print the table; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("policy", help="folder of a policy that drives along the route")
    parser.add_argument("--scenes", type=int, default=500, help="held-out scenes, from number 0 on")
    options = parser.parse_args()
    if options.scenes <= NEXT:
        parser.error(f"--scenes is {options.scenes}, expected more than {NEXT}")
    config = GrpoDrivingConfig()
    policy = load_driver(options.policy, FORMAT, "cpu", "along_route", ROUTE_POINTS)
    env: Any = gymnasium.make(config.env_of("held_out").id, **config.env_of("held_out").kwargs)
    env = env.unwrapped
    seen = [env.reset(options={"init_state_id": number})[0] for number in range(options.scenes)]
    sampling = Sampling(greedy=True, by_mean=True, temperature=config.temperature)
    scores: dict[str, list[float]] = {"own": [], "other_image": [], "other_motion": []}
    for number, own in enumerate(seen):
        other = seen[(number + NEXT) % len(seen)]
        cases = [own, with_other_image(own, other), with_other_motion(own, other)]
        tokens = policy.sample(policy.prepare(cases), [sampling] * len(cases)).tokens
        plans = policy.decode(tokens.numpy())
        for values, plan in zip(scores.values(), plans, strict=True):
            values.append(score_of(env, number, plan))
    figures: dict[str, float] = {"scenes": options.scenes, "own": mean_of(scores["own"])[0]}
    for name, values in scores.items():
        mean, half = mean_of(values)
        change, change_half = mean_of((np.array(values) - scores["own"]).tolist())
        print(f"{name:>14}  {mean:.3f} ± {half:.3f}  {change:+.3f} ± {change_half:.3f}")
        if name != "own":
            figures |= {name: change, f"{name}_half": change_half}
    print_json_line(figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
