"""Every family learns by reinforcement and is valued by a critic, whole or by adapters, in float32
and in bfloat16.
"""

import asyncio
from collections.abc import Callable, Iterable
from itertools import product
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from vla_rl.engines import DeviceLane, EngineConfig, TorchActionEngine
from vla_rl.learner import Critic, CriticConfig, Learner, LearnerConfig, OptimizerConfig
from vla_rl.models.flow.small import SmallFlowConfig, StateConfig
from vla_rl.models.flow.small_folder import create_small_flow
from vla_rl.models.openvla import OpenVla
from vla_rl.models.openvla_oft import ContinuousOpenVlaOft, OpenVlaOft, tiny
from vla_rl.models.prismatic.action_tokens import unit_bounds
from vla_rl.models.prismatic.config import LoraConfig, OpenVlaConfig
from vla_rl.models.prismatic.public_config import public_name
from vla_rl.types import EnvSpec, EpisodeSpec, Sampling, Step, StopReason, Trajectory

MakeObservation = Callable[..., dict[str, Any]]
FAMILIES = ("openvla", "tokens", "l1")
BFLOAT16 = torch.bfloat16


def made(family: str) -> Any:
    shape = tiny(image_size=28, chunk_size=2)
    if family == "openvla":
        fields = (
            "featurizer",
            "fused_featurizer",
            "image_size",
            "images",
            "llm",
            "tokenizer_file",
            "action_bounds",
        )
        return OpenVla.create(
            OpenVlaConfig(**{name: getattr(shape, name) for name in fields}), seed=0
        )
    if family == "flow":
        state = StateConfig(mean=(0.0,) * 8, std=(1.0,) * 8)
        config = SmallFlowConfig(
            actions=unit_bounds(7),
            state=state,
            cameras=("image", "wrist_image"),
            image_size=40,
            width=32,
            expert_width=24,
            horizon=2,
        )
        return create_small_flow(config, seed=0)
    if family == "tokens":
        return OpenVlaOft.create(shape, seed=0)
    return ContinuousOpenVlaOft.create(msgspec.structs.replace(shape, head="l1"), seed=0)


async def run_policy(
    policy: Any, lane: DeviceLane, make_observation: MakeObservation, episode_id: int
) -> Trajectory:
    """Three decisions of the policy's own."""
    sampling = Sampling(temperature=0.8)
    steps = []
    async with TorchActionEngine(policy, lane, EngineConfig()) as engine:
        for number in range(3):
            seen = make_observation(10 * episode_id + number)
            chunk = await engine.act(
                seen, msgspec.structs.replace(sampling, seed=10 * episode_id + number)
            )
            steps.append(
                Step(observation=seen, chunk=chunk, rewards=np.ones(len(chunk.actions), np.float32))
            )
    episode = EpisodeSpec(
        episode_id=episode_id,
        group_id=0,
        member=episode_id,
        env=EnvSpec(id="none"),
        task="none",
        seed=0,
        policy_seed=0,
        sampling=sampling,
    )
    return Trajectory(
        episode=episode,
        steps=tuple(steps),
        final_observation=make_observation(99),
        stop_reason=StopReason.TERMINATED,
    )


def with_proofs(*short: tuple[Any, ...], others: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Some variants for the suite, and the others, which are proofs.

    In float32 every test of the learner trains OpenVLA-OFT.
    """
    return [
        *short,
        *(pytest.param(*each, marks=pytest.mark.proof) for each in others if each not in short),
    ]


@pytest.mark.parametrize(
    ("family", "dtype", "is_adapted"),
    with_proofs(
        ("openvla", BFLOAT16, True),
        ("tokens", BFLOAT16, False),
        ("l1", BFLOAT16, True),
        ("flow", BFLOAT16, False),
        ("flow", torch.float32, False),
        others=product(FAMILIES, (torch.float32, BFLOAT16), (False, True)),
    ),
    ids=str,
)
async def test_small_steps_move_the_weights(
    family: str,
    dtype: torch.dtype,
    is_adapted: bool,
    lane: DeviceLane,
    make_observation: MakeObservation,
) -> None:
    """In bfloat16 the masters move, and what is published are the masters, rounded."""
    policy = made(family)
    policy.network.to(dtype)
    if is_adapted:
        policy = policy.adapted(LoraConfig(rank=2, alpha=4), seed=0)
    config = LearnerConfig(optimizer=OptimizerConfig(lr=1e-4, warmup_steps=0), max_mismatch=1.0)
    async with asyncio.timeout(100):
        trajectories = [
            await run_policy(policy, lane, make_observation, number) for number in range(2)
        ]
        learner = Learner(policy, lane, config)
        before = (await learner.snapshot()).policy
        for _ in range(3):
            report = await learner.update(trajectories, [1.0, -1.0])
        after = await learner.snapshot()
    assert report.metrics["update/skipped_steps"] == 0.0
    trained = [
        name for name, parameter in policy.network.named_parameters() if parameter.requires_grad
    ]
    moved = [
        name
        for name in trained
        if not torch.equal(before[public_name(name)], after.policy[public_name(name)])
    ]
    assert len(moved) > 0.5 * len(trained)  # towers' last blocks and norms never run
    masters = {
        name: after.optimizer[f"master/{name}"]
        for name in trained
        if f"master/{name}" in after.optimizer
    }
    assert len(masters) == (0 if dtype == torch.float32 else len(trained))
    assert all(
        torch.equal(after.policy[public_name(name)], master.to(dtype))
        for name, master in masters.items()
    )


@pytest.mark.parametrize(
    ("family", "trunk", "dtype"),
    with_proofs(
        ("openvla", "own", BFLOAT16),
        ("tokens", "shared", BFLOAT16),
        ("l1", "own", BFLOAT16),
        ("flow", "own", torch.float32),
        ("flow", "shared", torch.float32),
        others=product(FAMILIES, ("own", "shared"), (torch.float32, BFLOAT16)),
    ),
)
async def test_a_critic_learns_on_what_it_sees(
    family: str, trunk: Any, dtype: torch.dtype, lane: DeviceLane, make_observation: MakeObservation
) -> None:
    policy = made(family)
    policy.network.to(dtype)
    config = CriticConfig(trunk=trunk, optimizer=OptimizerConfig(lr=1e-2, warmup_steps=0), epochs=4)
    async with asyncio.timeout(100):
        trajectory = await run_policy(policy, lane, make_observation, 0)
        critic = Critic(policy, lane, config, seed=0)
        (before,) = await critic.values([trajectory])
        await critic.fit_values([trajectory], [before], [np.array([1.0, 1.0, 1.0], np.float32)])
        (after,) = await critic.values([trajectory])
    assert np.abs(before.values).max() < 1e-6
    assert after.values.min() > 0.0
