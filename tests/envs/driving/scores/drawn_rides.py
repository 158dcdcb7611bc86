"""Rides drawn from a seed, for golden numbers of Bench2Drive's smoothness."""

import numpy as np

from vla_rl.envs.driving.scores.comfort import Ride


def draw_ride(seed: int) -> Ride:
    rng = np.random.default_rng((30, seed))
    length = int(rng.integers(10, 140))
    times = np.arange(length) * 0.1
    heading = np.cumsum(rng.normal(0, 0.02, length) * rng.choice([0.0, 1.0]))
    heading = heading + 0.5 * np.sin(times * rng.uniform(0, 1)) * rng.choice([0.0, 1.0])
    forward = np.stack([np.cos(heading), np.sin(heading)], -1)
    right = np.stack([-forward[:, 1], forward[:, 0]], -1)
    along = rng.choice([0.3, 2.5]) * np.sin(times * float(rng.uniform(0.2, 2)))
    across = rng.normal(0, 0.3, (length, 1))
    rate = np.rad2deg(np.gradient(heading, 0.1)) * float(rng.choice([0.02, 1.0]))
    return Ride(along[:, None] * forward + across * right, forward, right, rate)
