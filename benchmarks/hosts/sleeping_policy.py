"""A policy that sleeps for as long as a GPU computes, and an agent that says when it began."""

import time
from collections.abc import Sequence
from typing import Final

import msgspec
import torch
from torch import Tensor, nn

from benchmarks.hosts.measured import ACTED_PER_S
from benchmarks.hosts.sleepers import ACTION_DIM, CHUNK_SIZE, STATE_SIZE
from vla_rl.engines import SampledTokens
from vla_rl.models.mlp import MlpConfig, MlpPolicy
from vla_rl.rollout import embodied_agent
from vla_rl.types import ActionChunk, Env, Observation, Policy, Sampling, Trajectory

HOSTS_PER_GPU: Final = 16
"""Hosts that share the pace of one GPU: two shared cores cannot serve more on eight of them."""

FIRST_DECISION: Final = "first_decision_at_s"
"""Key of an episode's info: when its first decision was there, by the clock of the machine."""


class SleepingPolicy(MlpPolicy):
    """A small policy as slow as a part of a GPU.

    Actions are drawn from hundreds of values, so that the lengths of episodes differ.
    """

    def sample(self, batch: Tensor, samplings: Sequence[Sampling]) -> SampledTokens:
        """Sleep, then sample."""
        time.sleep(len(samplings) * HOSTS_PER_GPU / ACTED_PER_S)
        return super().sample(batch, samplings)


def learn(network: nn.Module) -> None:
    """Change a weight: weights that are what they were are not sent again."""
    with torch.no_grad():
        next(network.parameters()).view(-1)[0] += 1.0


def sleeping_policy(hidden: tuple[int, ...] = (64,)) -> SleepingPolicy:
    """Return one with random weights."""
    config = MlpConfig(
        state_size=STATE_SIZE,
        action_low=(-1.0,) * ACTION_DIM,
        action_high=(1.0,) * ACTION_DIM,
        num_bins=64,
        chunk_size=CHUNK_SIZE,
        hidden=hidden,
    )
    policy = SleepingPolicy.create(config, seed=0)
    assert isinstance(policy, SleepingPolicy)
    return policy


class _Timed:
    """A policy that notes when it first decided."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.first_s: float | None = None

    def __getattr__(self, name: str) -> object:
        return getattr(self._policy, name)

    async def act(self, observation: Observation, sampling: Sampling | None = None) -> ActionChunk:
        chunk = await self._policy.act(observation, sampling)
        if self.first_s is None:
            self.first_s = time.monotonic()
        return chunk


async def timed_agent(env: Env, policy: Policy) -> Trajectory:
    """Run an episode as ever, and say in its info when its first decision was there."""
    timed = _Timed(policy)
    trajectory = await embodied_agent(env, timed)
    return msgspec.structs.replace(
        trajectory, info={**trajectory.info, FIRST_DECISION: timed.first_s}
    )
