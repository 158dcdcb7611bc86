"""Ranks give a loss the predictions that one process gives it, and score a reference by them."""

import msgspec
import numpy as np
import pytest
import torch
from drawing_policy import make_drawing_policy, run_episodes

from vla_rl.actors import Runtime
from vla_rl.algorithms import KlLossConfig, PolicyLossConfig
from vla_rl.engines import DeviceLane
from vla_rl.learner import Learner, LearnerConfig, OptimizerConfig, Reference
from vla_rl.learner.distributed import ShardedLearner

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
