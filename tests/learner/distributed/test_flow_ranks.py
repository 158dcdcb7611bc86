"""Ranks do with flow policies what one process does: the same predictions, the same kept prefixes."""

from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from drawing_policy import make_drawing_policy, run_episodes
from small_flow import run_episodes as run_flow_episodes, tiny_policy

from vla_rl.actors import Runtime
from vla_rl.algorithms import KlLossConfig, PolicyLossConfig
from vla_rl.engines import DeviceLane
from vla_rl.learner import CriticConfig, Learner, LearnerConfig, OptimizerConfig, Reference
from vla_rl.learner.distributed import ShardedLearner
from vla_rl.models.flow.trained_parts import choose_trained
from vla_rl.models.prismatic.config import LoraConfig

pytestmark = pytest.mark.asyncio(loop_scope="session")


ADVANTAGES = [1.0, -1.0, 0.5]

LOSS = PolicyLossConfig(name="nft", kl=KlLossConfig(coef=0.1, estimator="exact"))

SETTINGS = LearnerConfig(
    loss=LOSS,
    optimizer=OptimizerConfig(lr=0.01, warmup_steps=0),
    aggregation="token_mean",
    epochs=3,
    stop_kl=10.0,
)


async def test_ranks_predict_as_one_process_does(lane: DeviceLane, runtime: Runtime) -> None:
    policy = make_drawing_policy()
    episodes = await run_episodes(policy, lane)
    alone, shared = policy.copy(), policy.copy()
    references = await Reference(policy, lane, micro_batch=8, kl=LOSS.kl).log_probs(episodes)
    await Learner(alone, lane, SETTINGS).update(episodes, ADVANTAGES, references)
    learner = ShardedLearner(shared, runtime, lane, msgspec.structs.replace(SETTINGS, ranks=2))
    reference = learner.reference()
    async with learner:
        found = await reference.log_probs(episodes)
        for ours, theirs in zip(found, references, strict=True):
            np.testing.assert_allclose(np.stack(ours), np.stack(theirs), atol=1e-6)
        report = await learner.update(episodes, ADVANTAGES, found)
    assert report.metrics["update/steps"] == 3.0
    moved = 0.0
    for one, other, start in zip(
        alone.network.parameters(),
        shared.network.parameters(),
        policy.network.parameters(),
        strict=True,
    ):
        torch.testing.assert_close(other, one, atol=1e-5, rtol=0.0)
        moved += float((one - start).detach().abs().sum())
    assert moved > 0.01


KEEPING = LearnerConfig(
    optimizer=OptimizerConfig(lr=1e-3, warmup_steps=0),
    aggregation="token_mean",
    epochs=3,
    micro_batch=2,
)


@pytest.mark.parametrize(
    ("shard", "has_adapters"), [("gradients", False), ("weights", False), ("replicas", True)]
)
async def test_ranks_keep_prefixes_and_train_as_one_process_does(
    shard: str, has_adapters: bool, lane: DeviceLane, runtime: Runtime
) -> None:
    policy = tiny_policy()
    choose_trained(policy.network, "expert", None, seed=0, freezes_prefix=True)
    if has_adapters:
        policy = policy.adapted(LoraConfig(rank=2, alpha=4), seed=1)
    episodes = await run_flow_episodes(policy, lane)
    alone, shared = policy.copy(), policy.copy()
    without: Any = msgspec.structs.replace(KEEPING, prefix_cache_gib=0.0)
    await Learner(alone, lane, without).update(episodes, ADVANTAGES)
    config: Any = msgspec.structs.replace(KEEPING, ranks=2, shard=shard)
    learner = ShardedLearner(shared, runtime, lane, config)
    critic = learner.critic(CriticConfig(epochs=2), seed=0)
    async with learner:
        estimated = await critic.values(episodes)
        report = await learner.update(episodes, ADVANTAGES)
        returns = [each.values + 1.0 for each in estimated]
        await critic.fit_values(episodes, estimated, returns)
    assert report.metrics["update/steps"] == 3.0
    assert report.metrics["update/kept_prefix_gib"] > 0.0
    moved = 0.0
    pairs = zip(
        alone.network.parameters(),
        shared.network.parameters(),
        policy.network.parameters(),
        strict=True,
    )
    for one, other, start in pairs:
        torch.testing.assert_close(other, one, atol=1e-5, rtol=0.0)
        moved += float((one - start).detach().abs().sum())
    assert moved > 0.01
