"""Flow policies go through the same pipelines as others, and a critic sees their observations alone."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from vla_rl.algorithms import EmbeddingConfig
from vla_rl.engines import EngineConfig
from vla_rl.env_workers import SimulatorConfig
from vla_rl.learner import LearnerConfig
from vla_rl.models.flow.policy import FlowPolicy
from vla_rl.models.flow.small import SmallFlowConfig
from vla_rl.models.flow.small_folder import create_small_flow
from vla_rl.models.prismatic.action_tokens import ActionBounds
from vla_rl.pipelines.config import RunConfig
from vla_rl.pipelines.registry import with_pipeline
from vla_rl.recipes.train_toy import REACH, TrainToyConfig, training_starts
from vla_rl.reporting import read_metrics
from vla_rl.rollout import SchedulerConfig
from vla_rl.run.train import train

SHAPE = SmallFlowConfig(
    actions=ActionBounds(low=(-1.0, -1.0), high=(1.0, 1.0), is_scaled=(True, True)),
    image_size=32,
    horizon=2,
    padded_dim=2,
    depth=2,
    num_heads=2,
    width=32,
    expert_width=24,
)


def make_policy() -> FlowPolicy:
    """New ones predict no velocity at all; this one has learnt something."""
    policy = create_small_flow(SHAPE, seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in policy.network.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return policy


@pytest.mark.parametrize("pipeline", ["embodied_ppo", "embodied_grpo", "embodied_srpo", "nft"])
async def test_a_flow_policy_learns_by_every_pipeline_from_ratio_one(
    pipeline: str, tmp_path: Path
) -> None:
    config = with_pipeline(
        TrainToyConfig(
            run=RunConfig(name="flow", root=str(tmp_path), updates=2, videos_every=9),
            env_id=REACH,
            group_size=3,
            num_starts=4,
            step_limit=8,
            simulators=SimulatorConfig(num_envs=2, envs_per_process=2),
            scheduler=SchedulerConfig(groups_per_update=2, max_staleness=0, deterministic=True),
            engine=EngineConfig(is_deterministic=True),
            embedding=EmbeddingConfig(encoder="state"),
            learner=LearnerConfig(micro_batch=5),
        ),
        pipeline,
    )
    policy, start = make_policy(), make_policy()
    async with asyncio.timeout(110):
        outcome = await train(config, training_starts(config), policy)
    lines: list[dict[str, Any]] = list(read_metrics(outcome.run.metrics))
    assert [line["update"] for line in lines] == [1, 2]
    trained = [line for line in lines if line["update/trained"]]
    # the chunk's ratio, and not that of a number: rounding adds up over the numbers
    assert all(line["update/log_prob_gap_max"] < 1e-5 for line in trained)
    assert all(line["update/ratio_mean"] == pytest.approx(1.0, abs=1e-5) for line in trained)
    assert ("critic/loss" in lines[0]) == (pipeline == "embodied_ppo")
    pairs = zip(policy.network.parameters(), start.network.parameters(), strict=True)
    assert bool(trained) == any(not torch.equal(one, other) for one, other in pairs)
    assert trained or pipeline != "embodied_ppo"
