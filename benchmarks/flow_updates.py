"""Compare updates of a flow policy's expert that keep the frozen prefix with updates that compute it in each epoch.

The policy is `flow_decisions`' small one of LIBERO's size. Both updates take the same episodes, minibatches and
seeds.
"""

import asyncio
import time
from typing import Final

import numpy as np
import torch
from msgspec.structs import replace

from benchmarks.flow_decisions import make_observations, make_policy
from vla_rl.engines import DeviceLane
from vla_rl.learner import Learner, LearnerConfig, OptimizerConfig
from vla_rl.models.flow.policy import FlowPolicy
from vla_rl.models.flow.trained_parts import choose_trained
from vla_rl.types import ActionChunk, EnvSpec, EpisodeSpec, Sampling, Step, StopReason, Trajectory

NUM_EPISODES: Final = 16
NUM_DECISIONS: Final = 4
NUM_ROUNDS: Final = 2

SETTINGS: Final = LearnerConfig(
    epochs=4,
    minibatch_trajectories=4,
    micro_batch=16,
    optimizer=OptimizerConfig(lr=1e-5, warmup_steps=0),
)


def make_episodes(policy: FlowPolicy) -> list[Trajectory]:
    """Make episodes of observations of noise, in which the policy has decided."""
    seen = make_observations(NUM_EPISODES * NUM_DECISIONS)
    with torch.inference_mode():
        samplings = [Sampling(seed=row) for row in range(len(seen))]
        found = policy.sample(policy.prepare(seen), samplings)
    assert found.chunk is not None
    actions = policy.decode(found.chunk.numpy())
    steps = [
        Step(
            observation=seen[row],
            chunk=ActionChunk(
                actions=actions[row],
                tokens=found.tokens[row].numpy(),
                log_probs=found.log_probs[row].numpy(),
                weight_version=0,
                drawn={name: values[row, ...].numpy() for name, values in found.drawn.items()},
            ),
            rewards=np.zeros(len(actions[row]), np.float32),
        )
        for row in range(len(seen))
    ]
    return [make_episode(number, steps[number::NUM_EPISODES]) for number in range(NUM_EPISODES)]


def make_episode(number: int, steps: list[Step]) -> Trajectory:
    """Put decisions into an episode."""
    spec = EpisodeSpec(
        episode_id=number,
        group_id=0,
        member=number,
        env=EnvSpec(id="none"),
        task="none",
        seed=0,
        policy_seed=0,
    )
    return Trajectory(
        episode=spec,
        steps=tuple(steps),
        final_observation={},
        stop_reason=StopReason.TERMINATED,
        info={},
    )


async def measure_update(policy: FlowPolicy, gib: float) -> tuple[float, float]:
    """Return the CPU seconds of an update, and the GiB of prefixes that it kept."""
    trained = policy.copy()
    episodes = make_episodes(policy)
    advantages = np.random.default_rng(0).normal(size=len(episodes)).tolist()
    async with DeviceLane(num_threads=1) as lane:
        learner = Learner(trained, lane, replace(SETTINGS, prefix_cache_gib=gib))
        began = time.process_time()
        report = await learner.update(episodes, advantages)
        seconds = time.process_time() - began
    return seconds, report.metrics.get("update/kept_prefix_gib", 0.0)


def measure_updates() -> dict[str, float]:
    """Return the CPU time of an update with kept prefixes over that without; the faster of two turns each."""
    torch.set_num_threads(1)
    policy = make_policy()
    choose_trained(policy.network, "expert", None, seed=0, freezes_prefix=True)
    kept, computed, gib = [], [], 0.0
    for _ in range(NUM_ROUNDS):
        seconds, gib = asyncio.run(measure_update(policy, SETTINGS.prefix_cache_gib))
        kept.append(seconds)
        computed.append(asyncio.run(measure_update(policy, 0.0))[0])
    millions = sum(weights.numel() for weights in policy.network.parameters()) / 1e6
    return {
        "update_with_kept_prefix_vs_without": min(kept) / min(computed),
        "update_kept_prefix_gib": gib,
        "update_cpu_s": min(kept),
        "parameters_millions": round(millions, 2),
    }
