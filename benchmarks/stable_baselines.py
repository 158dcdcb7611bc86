"""stable-baselines3 on simulator processes and on its own vector environments:
`python -m benchmarks.stable_baselines`.

Needs the extra `bench`. It checks that the same seeds and actions give the same bits as its
`DummyVecEnv`, over several environments, and that its PPO learns CartPole-v1 through the adapter.
It measures control steps a second, compared with its `SubprocVecEnv` (a process for each
environment, its only setting) and `DummyVecEnv` (no process), with an environment that takes almost
no time and with one that computes for a millisecond a step.

Prints a table, and as its last line a JSON object; goals: differing_steps = 0, ppo_return >= 150.
The ratios of speeds depend on the machine: a process pays only if its environment computes for
longer than a message takes.
"""

import argparse
import os
import time
from functools import partial
from typing import Any

import gymnasium
import numpy as np

from benchmarks.interleaved import print_json_line, print_table, ratio_of, sample_in_turn
from vla_rl.env_workers import SimulatorConfig

NUM_ENVS = 8
PACKED = SimulatorConfig(envs_per_process=-(-NUM_ENVS // (os.cpu_count() or 1)))
IDS = ("CartPole-v1", "Pendulum-v1", "Acrobot-v1", "MountainCarContinuous-v0", "FrozenLake-v1")
BUSY_ID = "benchmarks.stable_baselines:bench/Busy-v0"


class Busy(gymnasium.Wrapper[Any, Any, Any, Any]):
    """CartPole that computes for a millisecond a step."""

    def __init__(self) -> None:
        super().__init__(gymnasium.make("CartPole-v1"))

    def step(self, action: Any) -> Any:
        """Run one control step."""
        until = time.perf_counter() + 1e-3
        while time.perf_counter() < until:
            pass
        return self.env.step(action)


gymnasium.register("bench/Busy-v0", "benchmarks.stable_baselines:Busy")


def is_same(ours: Any, theirs: Any) -> bool:
    """Return whether values, kinds, shapes and dtypes are equal, recursively."""
    if isinstance(theirs, dict):
        return ours.keys() == theirs.keys() and all(
            is_same(ours[key], theirs[key]) for key in theirs
        )
    if isinstance(theirs, list | tuple):
        return len(ours) == len(theirs) and all(map(is_same, ours, theirs))
    if isinstance(theirs, np.ndarray):
        return ours.dtype == theirs.dtype and np.array_equal(ours, theirs)
    return bool(ours == theirs)


def differing_steps(num_steps: int = 300) -> int:
    """Count the steps of all `IDS` in which the adapter's results differ from those of
    `DummyVecEnv`.
    """
    from stable_baselines3.common.vec_env import DummyVecEnv

    from vla_rl.env_workers.stable_baselines import make_sb3_vec

    count = 0
    for env_id in IDS:
        ours = make_sb3_vec(env_id, NUM_ENVS, config=PACKED)
        theirs = DummyVecEnv([partial(gymnasium.make, env_id)] * NUM_ENVS)
        ours.seed(7)
        theirs.seed(7)
        count += not is_same(ours.reset(), theirs.reset())
        theirs.action_space.seed(7)
        for _ in range(num_steps):
            actions = np.array([theirs.action_space.sample() for _ in range(NUM_ENVS)])
            count += not is_same(ours.step(actions), theirs.step(actions))
        ours.close()
        theirs.close()
    return count


def ppo_return(num_steps: int = 40_000) -> float:
    """Return the mean return of the last hundred training episodes of PPO on CartPole-v1."""
    from stable_baselines3 import PPO
    from stable_baselines3.common.vec_env import VecMonitor

    from vla_rl.env_workers.stable_baselines import make_sb3_vec

    envs = VecMonitor(make_sb3_vec("CartPole-v1", NUM_ENVS, config=PACKED))
    model = PPO(
        "MlpPolicy", envs, n_steps=128, batch_size=256, learning_rate=1e-3, device="cpu", seed=0
    )
    model.learn(num_steps)
    envs.close()
    return float(np.mean([episode["r"] for episode in model.ep_info_buffer]))


def steps_per_second(envs: Any, seconds: float = 2.0) -> float:
    """Measure control steps a second over all environments."""
    envs.reset()
    actions = np.zeros(NUM_ENVS, np.int64)
    count, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        for _ in range(10):
            envs.step(actions)
        count += 10
    return count * NUM_ENVS / (time.perf_counter() - began)


def main() -> None:
    """Check, measure and print."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv

    from vla_rl.env_workers.stable_baselines import make_sb3_vec

    figures: dict[str, object] = {"differing_steps": differing_steps(), "ppo_return": ppo_return()}
    for name, env_id in (("cheap", "CartPole-v1"), ("busy", BUSY_ID)):
        functions = [partial(gymnasium.make, env_id)] * NUM_ENVS
        made = {
            "ours": make_sb3_vec(env_id, NUM_ENVS, config=PACKED),
            "subproc": SubprocVecEnv(functions),
            "dummy": DummyVecEnv(functions),
        }
        samples = sample_in_turn(
            {way: partial(steps_per_second, envs) for way, envs in made.items()}, 5
        )
        for envs in made.values():
            envs.close()
        figures |= {
            f"{name}_vs_{peer}": ratio_of(samples, "ours", peer) for peer in ("subproc", "dummy")
        }
    print_table("stable-baselines3", figures)
    print_json_line(figures)


if __name__ == "__main__":
    main()
