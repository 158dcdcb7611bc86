"""A tiny flow policy with two cameras, a state and padding; observations and episodes for it."""

from typing import Any

import msgspec
import numpy as np
import torch
from small_episodes import trajectory

from vla_rl.engines import DeviceLane, EngineConfig, TorchActionEngine
from vla_rl.models.flow.config import FlowSampling
from vla_rl.models.flow.policy import FlowPolicy
from vla_rl.models.flow.small import SmallFlowConfig, StateConfig
from vla_rl.models.flow.small_folder import create_small_flow
from vla_rl.models.prismatic.action_tokens import ActionBounds
from vla_rl.rollout import EpisodePolicy, copy_chunk
from vla_rl.types import Observation, Sampling, Step, Trajectory

BOUNDS = ActionBounds(low=(-2.0, -1.0, -1.0), high=(2.0, 3.0, 1.0), is_scaled=(True, True, False))
TINY = SmallFlowConfig(
    actions=BOUNDS,
    state=StateConfig(mean=(0.5, 0.0), std=(2.0, 1.0)),
    cameras=("image", "wrist_image"),
    optional_cameras=("wrist_image",),
    image_size=16,
    patch_size=8,
    horizon=4,
    padded_dim=5,
    depth=2,
    num_heads=2,
    width=32,
    expert_width=24,
)
WORDS = ("reach red", "reach the green square now", "move", "put the bowl on the plate")


def tiny_policy(seed: int = 0, **sampling: Any) -> FlowPolicy:
    """Make a policy whose velocity depends on all its inputs: new ones predict 0."""
    policy = create_small_flow(TINY, seed, FlowSampling(**sampling))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.network.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return policy


def observe(seed: int) -> Observation:
    """Return a seed's observation; every third lacks the hand camera."""
    random = np.random.default_rng(seed)
    images = random.integers(0, 256, (2, 16, 16, 3), dtype=np.uint8)
    seen: Observation = {
        "image": images[0],
        "state": random.normal(size=2).astype(np.float32),
        "instruction": WORDS[seed % len(WORDS)],
    }
    return seen if seed % 3 == 2 else {**seen, "wrist_image": images[1]}


async def run_episodes(policy: FlowPolicy, lane: DeviceLane) -> list[Trajectory]:
    """Let a policy decide in three episodes of two decisions."""
    found = []
    async with TorchActionEngine(policy, lane, EngineConfig()) as engine:
        for number in range(3):
            made_up = trajectory([[1.0, 1.0], [0.0, 0.0]], number)
            acting, steps = EpisodePolicy(engine, made_up.episode), []
            for index, step in enumerate(made_up.steps):
                seen = observe(2 * number + index)
                chunk = copy_chunk(await acting.act(seen, Sampling()))
                steps.append(Step(observation=seen, chunk=chunk, rewards=step.rewards))
            found.append(msgspec.structs.replace(made_up, steps=tuple(steps)))
    return found
