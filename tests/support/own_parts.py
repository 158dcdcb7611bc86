"""Parts of one's own, as a configuration or another host names them: losses, a policy, a pipeline, agents."""

import asyncio
import itertools
import os
import signal
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vla_rl.algorithms.losses import Diagnostics, TokenBatch, clipped_surrogate
from vla_rl.algorithms.losses.policy.ppo import PpoLossConfig
from vla_rl.graph import Pipeline
from vla_rl.models.mlp import MlpPolicy
from vla_rl.pipelines.grpo import grpo
from vla_rl.pipelines.nodes.rewards import Reward, RewardFunction
from vla_rl.pipelines.parts import Parts
from vla_rl.rollout import copy_arrays, copy_chunk, embodied_agent, stop_reason
from vla_rl.types import Env, Group, Policy, Step, Trajectory

num_calls = itertools.count(1)
reached = threading.Event()
go_on = threading.Event()


def plain(batch: TokenBatch) -> tuple[Tensor, Diagnostics]:
    """The clipped surrogate with the default bounds."""
    return clipped_surrogate(batch, PpoLossConfig())


def nan_loss(batch: TokenBatch) -> tuple[Tensor, Diagnostics]:
    """NaN everywhere."""
    losses, diagnostics = plain(batch)
    return losses * torch.nan, diagnostics


def second_micro_batch_waits(batch: TokenBatch) -> Any:
    """The clipped surrogate; its second call waits for `go_on`."""
    if next(num_calls) == 2:
        reached.set()
        go_on.wait(30)
    return plain(batch)


def nan_of_large_advantages(batch: TokenBatch) -> tuple[Tensor, Diagnostics]:
    """The clipped surrogate, but NaN for rows whose advantage is above 10."""
    losses, diagnostics = plain(batch)
    return losses * torch.where(batch.advantage > 10.0, torch.nan, 1.0), diagnostics


def fails_as_the_file_says(batch: TokenBatch) -> tuple[Tensor, Diagnostics]:
    """The clipped surrogate, but on rank 1 each call takes a line out of FAILURES_FILE, and fails so."""
    path = Path(os.environ.get("FAILURES_FILE", ""))
    shared = torch.distributed.is_initialized()
    if shared and path.is_file() and torch.distributed.get_rank() == 1:
        how, _, later = path.read_text().partition("\n")
        path.write_text(later)
        if how == "RuntimeError":
            raise RuntimeError("the device is gone")
        if how.startswith("SIG"):
            os.kill(os.getpid(), signal.Signals[how])
    return plain(batch)


class StartsAsTheFileSays(MlpPolicy):
    """An MLP; each time rank 1 loads it, it takes a line out of STARTS_FILE, and fails so."""

    @classmethod
    def load(cls, folder: Path) -> MlpPolicy:
        """Read the policy, unless the file says that the device is gone."""
        path = Path(os.environ.get("STARTS_FILE", ""))
        shared = torch.distributed.is_initialized()
        if shared and path.is_file() and torch.distributed.get_rank() == 1:
            how, _, later = path.read_text().partition("\n")
            path.write_text(later)
            if how == "RuntimeError":
                raise RuntimeError("the device is gone")
            if how == "SIGKILL":
                os.kill(os.getpid(), signal.SIGKILL)
        return super().load(folder)


SETTINGS: dict[str, Any] = {"temperature": 1.5}


def without_checkpoints(parts: Parts) -> Pipeline:
    return grpo(parts).remove_node("checkpoint")


def by_length(trajectory: Trajectory) -> float:
    return -float(len(trajectory.steps))


async def by_length_later(trajectory: Trajectory) -> float:
    await asyncio.sleep(0)
    return by_length(trajectory)


together = threading.Barrier(2, timeout=20)


def waits_for_the_other(_: Trajectory) -> float:
    together.wait()
    return 1.0


async def halved(group: Group, reward: RewardFunction) -> Sequence[Reward]:
    values = [reward(trajectory) for trajectory in group.trajectories]
    return [0.5 * value for value in values if isinstance(value, float)]


async def hesitant_agent(env: Env, policy: Policy) -> Trajectory:
    """Wait for a second, then act as ever."""
    await asyncio.sleep(1.0)
    return await embodied_agent(env, policy)


async def by_turns(env: Env, policies: Mapping[str, Policy], *, first: str) -> Trajectory:
    """Let `first` and the other policy decide by turns until the episode ends."""
    names = [first, *sorted(policies.keys() - {first})]
    observation, _ = await env.reset()
    steps: list[Step] = []
    while True:
        agent, seen = names[len(steps) % len(names)], copy_arrays(observation)
        chunk = await policies[agent].act(seen)
        outcome = await env.step_chunk(chunk.actions)
        rewards = np.array(outcome.rewards)
        steps.append(Step(observation=seen, chunk=copy_chunk(chunk), rewards=rewards, agent=agent))
        if outcome.terminated or outcome.truncated:
            return Trajectory(
                episode=env.episode,
                steps=tuple(steps),
                final_observation=copy_arrays(outcome.observation),
                stop_reason=stop_reason(outcome.terminated, outcome.info),
                info=copy_arrays(outcome.info),
            )
        observation = outcome.observation
