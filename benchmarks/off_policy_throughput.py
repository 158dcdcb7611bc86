"""Decisions per second of robots while a head learns off-policy, against the same robots without learning.

    python -m benchmarks.off_policy_throughput [--decisions 300] [--robots 4] [--chunk-s 0.4] [--updates 1 5 20 30]

Robots are coroutines that execute a chunk for as long as a real one would: 8 control steps at 20 Hz take
0.4 s. The policy is a head over a small OpenVLA-OFT, which acts by the torch engine; the learner stores
each episode of 12 decisions and makes its gradient steps on the same device lane. As in a run, a robot
pauses once eight episodes wait for the learner.

Keys of the last line:
    throughput_with_learning_vs_acting   decisions per second with N updates a decision over those without
                                         learning, by N
    longest_wait_s                       longest time from asking for a decision to its answer, by N; 0: without
    step_s                               seconds of a gradient step on the lane, mean, by N
    step_cpu_s                           seconds of a core that a gradient step takes: on a busy machine, the others
                                         are as long as the machine lets them be
"""

import argparse
import asyncio
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import uvloop

from benchmarks.interleaved import print_json_line
from vla_rl.engines import DeviceLane, EngineConfig, TorchActionEngine
from vla_rl.learner.off_policy.config import OffPolicyConfig
from vla_rl.learner.off_policy.learner import OffPolicyLearner
from vla_rl.learner.off_policy.run_replay import RunReplay
from vla_rl.models.example_inputs import example_observation
from vla_rl.models.openvla_oft import OpenVlaOft, tiny
from vla_rl.models.steered import SteeredPolicy, SteeringConfig
from vla_rl.replay.config import RunReplayConfig
from vla_rl.types import EnvSpec, EpisodeSpec, Sampling, Step, StopReason, Trajectory

CPU_STEPS = 100
EPISODE = 12
MOST_WAITING = 8


class Robots:
    """Robots that act, and hand their episodes to a queue.

    Args:
        policy: acts.
        chunk_s: seconds in which a robot executes a chunk.
        wanted: decisions in all.
    """

    def __init__(self, policy: SteeredPolicy, chunk_s: float, wanted: int) -> None:
        self._policy, self._chunk_s, self._wanted = policy, chunk_s, wanted
        self.episodes: asyncio.Queue[Trajectory] = asyncio.Queue(MOST_WAITING)
        self.num_decisions = 0
        self.longest_wait_s = 0.0
        seen = example_observation(policy.base.policy, 0)
        assert seen is not None
        self._observation = {key: value for key, value in seen.items() if key != "drawn"}

    async def run(self, engine: TorchActionEngine, robot: int) -> None:
        """Run episodes of one robot until all robots together have made enough decisions."""
        number = 0
        while self.num_decisions < self._wanted:
            await self.episodes.put(await self._run_episode(engine, robot * 100_000 + number))
            number += 1

    async def _run_episode(self, engine: TorchActionEngine, episode_id: int) -> Trajectory:
        steps = []
        for decision in range(EPISODE):
            asked = time.perf_counter()
            chunk = await engine.act(self._observation, Sampling(seed=episode_id + decision))
            self.longest_wait_s = max(self.longest_wait_s, time.perf_counter() - asked)
            await asyncio.sleep(self._chunk_s)
            self.num_decisions += 1
            rewards = np.zeros(len(chunk.actions), np.float32)
            steps.append(Step(observation=self._observation, chunk=chunk, rewards=rewards))
        spec = EpisodeSpec(
            episode_id=episode_id,
            group_id=episode_id,
            member=0,
            env=EnvSpec(id="robot"),
            task="robot",
            seed=0,
            policy_seed=0,
        )
        return Trajectory(
            episode=spec,
            steps=tuple(steps),
            final_observation=self._observation,
            stop_reason=StopReason.SUCCESS if episode_id % 2 else StopReason.TERMINATED,
        )


class Measured(NamedTuple):
    """Figures of one number of updates a decision."""

    rate: float
    """Decisions per second."""

    longest_wait_s: float
    step_s: float
    step_cpu_s: float


async def measure(arguments: argparse.Namespace, updates: float) -> Measured:
    """Run the robots, with a learner that makes this many gradient steps for each decision."""
    policy = SteeredPolicy.create(OpenVlaOft.create(tiny(), 0), SteeringConfig(), seed=0)
    config = OffPolicyConfig(
        algorithm="rlt",
        updates_per_decision=max(updates, 1e-9),
        first_rows=1 if updates else 10**9,
        critic_first_steps=0,
    )
    with tempfile.TemporaryDirectory() as folder:
        async with DeviceLane(1) as lane:
            engine = TorchActionEngine(policy.copy(), lane, EngineConfig())
            replay = RunReplay(policy.layout, RunReplayConfig())
            learner = OffPolicyLearner(
                policy,
                lane,
                config,
                replay,
                describe_states=policy.describe_states,
                publish_to=[engine],
            )
            robots = Robots(policy, arguments.chunk_s, arguments.decisions)
            num_learnt = 0
            async with engine:
                with replay.opened(Path(folder)):
                    started = time.perf_counter()
                    async with asyncio.TaskGroup() as group:
                        running = [
                            group.create_task(robots.run(engine, robot))
                            for robot in range(arguments.robots)
                        ]
                        while num_learnt < arguments.decisions:
                            episode = await robots.episodes.get()
                            reward = float(episode.is_success)
                            earned = np.array([0.0] * (EPISODE - 1) + [reward], np.float32)
                            await learner.update([episode], [earned])
                            num_learnt += EPISODE
                        seconds = time.perf_counter() - started
                        for task in running:
                            task.cancel()
                    busy, steps = lane.busy_seconds().get("update", 0.0), learner.training.num_steps
                    cpu_s = time.process_time()
                    if updates:
                        await learner.learn_steps(CPU_STEPS)
                    cpu_s = (time.process_time() - cpu_s) / CPU_STEPS
    return Measured(num_learnt / seconds, robots.longest_wait_s, busy / max(steps, 1), cpu_s)


async def throughput_with_learning_vs_acting(
    arguments: argparse.Namespace,
) -> dict[str, dict[str, float]]:
    """Measure each number of updates a decision, with acting alone before and after them."""
    before = await measure(arguments, 0)
    found = {str(updates): await measure(arguments, updates) for updates in arguments.updates}
    after = await measure(arguments, 0)
    alone = (before.rate + after.rate) / 2
    return {
        "throughput_with_learning_vs_acting": {
            name: round(each.rate / alone, 3) for name, each in found.items()
        },
        "longest_wait_s": {
            "0": round(max(before.longest_wait_s, after.longest_wait_s), 4),
            **{name: round(each.longest_wait_s, 4) for name, each in found.items()},
        },
        "step_s": {name: round(each.step_s, 5) for name, each in found.items()},
        "step_cpu_s": {name: round(each.step_cpu_s, 5) for name, each in found.items()},
    }


def parse_arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--decisions", type=int, default=300, help="decisions of each measurement")
    parser.add_argument("--robots", type=int, default=4, help="robots at the same time")
    parser.add_argument("--chunk-s", type=float, default=0.4, help="seconds of a chunk")
    parser.add_argument(
        "--updates", type=int, nargs="+", default=[1, 5, 20, 30], help="updates a decision"
    )
    return parser.parse_args(given)


if __name__ == "__main__":
    print_json_line(uvloop.run(throughput_with_learning_vs_acting(parse_arguments())))
