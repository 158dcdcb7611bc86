"""A pipeline, a reward and a manager of one's own, as a configuration names them."""

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

from vla_rl.graph import Pipeline
from vla_rl.pipelines.grpo import grpo
from vla_rl.pipelines.nodes.rewards import Reward, RewardFunction
from vla_rl.pipelines.parts import Parts
from vla_rl.types import Group, Trajectory

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
