"""Learner ranks write new weights into the memory that vLLM's processes read."""

import asyncio

import pytest
from small_policies import completing_policy

from benchmarks import conversations
from benchmarks.shared_updates import settings
from vla_rl.actors import Runtime
from vla_rl.engines import DeviceLane, EngineConfig
from vla_rl.engines.vllm import VllmChatEngine
from vla_rl.learner.distributed import ShardedLearner
from vla_rl.models.vllm import serve

pytestmark = [
    pytest.mark.asyncio,
    pytest.mark.needs_vllm,
    pytest.mark.proof,
    pytest.mark.filterwarnings("ignore:Unclosed context:ResourceWarning"),
]


@pytest.mark.parametrize("tensor_parallel", [1, 2])
async def test_engines_hold_the_bytes_of_the_ranks(tensor_parallel: int) -> None:
    policy = completing_policy()
    config = settings(ranks=2, tensor_parallel=tensor_parallel)
    trajectories = [conversations.chat(policy, 0), conversations.broken(policy, 1)]
    async with (
        asyncio.timeout(280),
        DeviceLane(1) as lane,
        Runtime() as runtime,
        VllmChatEngine(serve(policy), lane, EngineConfig(kind="vllm")) as engine,
        ShardedLearner(policy, runtime, lane, config, [engine]) as learner,
    ):
        first = set((await engine.checksums()).values())
        engine.apply_in_background()
        await learner.update(trajectories, [1.0, -0.5])
        assert engine.pending_version == 1
        await engine.wait_applied()
        written = set((await engine.checksums()).values())
        assert engine.weight_version == 1
        assert len(written) == 1
        assert written != first
        # the model of this process had nothing to do with it, and holds the same when it is asked
        await learner.ranks.fetch_weights()
        await lane.run(engine.apply_weights, policy.network, 2)
        await engine.wait_applied()
        assert set((await engine.checksums()).values()) == written
