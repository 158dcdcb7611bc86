"""Ranks that share each layer compute what one process computes; what cannot be shared is refused."""

import math
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
import transformers
from small_episodes import mlp
from tiny_vision import tiny_vision
from weight_hosts import Host, Site

from benchmarks import conversations
from benchmarks.sharded_learning import episodes, small_oft
from benchmarks.shared_updates import gradients, relative_difference, saved, settings
from vla_rl.actors import Runtime
from vla_rl.engines import DeviceLane
from vla_rl.errors import ConfigError, RankNotStarted
from vla_rl.learner import Learner, LearnerConfig
from vla_rl.learner.backend import WeightSink
from vla_rl.learner.distributed import RankFailed, ShardedLearner
from vla_rl.learner.distributed.state import LocalBlock
from vla_rl.learner.estimates.rank_memory import measure_policy, rank_memory, require_layout
from vla_rl.models.prismatic.config import LoraConfig
from vla_rl.remote_rollout.flat_weights import weights_digest
from vla_rl.run.resuming import Restarts

ADVANTAGES = (1.0, -0.5, 0.25)


def gap(found: Any, expected: Any) -> float:
    """The norm of the differences of all weights over the norm of the weights."""
    pairs = list(
        zip(found.network.parameters(), expected.network.parameters(), strict=True),
    )
    apart = math.sqrt(sum(float((a - b).detach().square().sum()) for a, b in pairs))
    return apart / math.sqrt(sum(float(b.detach().square().sum()) for _, b in pairs))


@pytest_asyncio.fixture(loop_scope="session")
async def lane() -> AsyncIterator[DeviceLane]:
    async with DeviceLane(num_threads=1) as lane:
        yield lane


class Near:
    """An engine of this process: it reads the model, so new weights come here, too."""

    def __init__(self) -> None:
        self.network = torch.nn.Module()

    def apply_weights(self, network: torch.nn.Module, weight_version: int) -> None: ...


@pytest.mark.asyncio(loop_scope="session")
async def test_two_ranks_that_share_layers_learn_what_one_process_learns_and_end_as_one(
    runtime: Runtime, lane: DeviceLane, tmp_path: Path
) -> None:
    """A host that acts with their weights gets what they hold, too, each at its place."""
    alone, shared = conversations.qwen3(), conversations.qwen3()
    trajectories = episodes(alone)
    one = Learner(alone, lane, settings())
    config = settings(ranks=2, tensor_parallel=2)
    host = Host("a", [], network=conversations.qwen3().network)
    site = Site(host)
    site.open()
    sinks: list[WeightSink] = [Near(), site.sink]
    async with ShardedLearner(shared, runtime, lane, config, sinks) as two:
        expected = await gradients(one, trajectories, ADVANTAGES, tmp_path / "one")
        found = await gradients(two, trajectories, ADVANTAGES, tmp_path / "two")
        assert relative_difference(found, expected) <= 3e-6
        reports = [await each.update(trajectories, list(ADVANTAGES)) for each in (one, two)]
        compared = [
            {name: value for name, value in each.metrics.items() if name in reports[0].metrics}
            for each in reports
        ]
        for each in compared:
            del each["update/seconds"]
        assert compared[1] == pytest.approx(compared[0], rel=1e-4, abs=1e-5)
        assert gap(shared, alone) <= 1e-5
        await site.wait_applied()
        assert host.digest == weights_digest(shared.network) == weights_digest(host.network)
        assert host.num_put == 0

        continued = conversations.qwen3()
        resumed = Learner(continued, lane, settings())
        await resumed.restore(await saved(two, tmp_path / "by-two"))
        await two.restore(await saved(one, tmp_path / "by-one"))
        for learner in (two, resumed):
            await learner.update(trajectories, list(ADVANTAGES))
        assert gap(continued, shared) <= 1e-5

        pid = runtime.info(two.ranks.ranks[1]).pid
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(RankFailed, match=r"rank 1 of 2 .* is gone: SIGKILL.*all ranks"):
            await two.update(trajectories, list(ADVANTAGES))


def qwen3_moe() -> Any:
    shape = transformers.Qwen3MoeConfig(
        **conversations.QWEN3,
        intermediate_size=64,
        moe_intermediate_size=16,
        num_experts=4,
        num_experts_per_tok=2,
    )
    return conversations.with_random_weights(transformers.Qwen3MoeForCausalLM, shape)


@pytest.mark.parametrize(
    ("make", "named"),
    [(mlp, "MlpPolicy"), (qwen3_moe, "kind qwen3_moe"), (tiny_vision, "kind qwen2_5_vl")],
)
def test_a_family_without_a_plan_is_refused_by_name(make: Any, named: str) -> None:
    config = LearnerConfig(ranks=2, tensor_parallel=2)
    with pytest.raises(ConfigError, match=rf"{named} has no plan for tensor .*--learner\.shard"):
        require_layout(make(), config)


def test_ranks_that_cannot_share_heads_are_refused() -> None:
    with pytest.raises(ConfigError, match="tensor_parallel is 2, expected a divisor of ranks = 3"):
        LearnerConfig(ranks=3, tensor_parallel=2)
    too_many = LearnerConfig(ranks=4, tensor_parallel=4)
    with pytest.raises(ConfigError, match=r"is 4, but .* has 2 heads of keys .* divisor of 2"):
        require_layout(conversations.qwen3(), too_many)
    assert LearnerConfig(ranks=4, tensor_parallel=2).row_groups == 2


def test_whole_weights_and_gradients_of_a_rank_are_those_of_its_part_of_the_layers() -> None:
    policy = conversations.qwen3()
    numbers = 2 * (32 * 8 * (4 + 2 + 2 + 4) + 3 * 32 * 64)  # two layers of attention and products
    config = LearnerConfig(ranks=4, tensor_parallel=2)
    size = measure_policy(policy, config)
    assert size.num_cut == numbers
    parts = rank_memory(size, config)
    kept = size.num_trained - numbers // 2
    assert (parts.weights, parts.gradients) == (4 * kept, 4 * kept)
    assert parts.masters == 4 * -(-size.num_trained // 4)
    assert rank_memory(size, config, has_reference=True).reference == 4 * kept


def test_an_adapter_is_cut_where_its_layer_is() -> None:
    plan = small_oft().adapted(LoraConfig(rank=2, alpha=4), seed=1).tensor_plan()
    first = "language_model.model.layers.0"
    assert f"{first}.self_attn.q_proj.base_layer" in plan.by_outputs
    assert f"{first}.self_attn.q_proj.lora_B.default" in plan.by_outputs
    assert f"{first}.mlp.down_proj.lora_A.default" in plan.by_inputs
    assert not any("lora_A" in name for name in plan.by_outputs)


@pytest.mark.parametrize("length", [1, 5, 7, 100])
@pytest.mark.parametrize(("columns", "first"), [(6, 0), (2, 4)])
def test_pieces_of_a_block_cover_it_once(columns: int, first: int, length: int) -> None:
    local_block = LocalBlock(1, 3, 6, first, columns, is_first_copy=True)
    whole, seen = np.arange(30).reshape(5, 6), []
    block = whole[1:4, first : first + columns].flatten()
    for begin, end, start in local_block.pieces(length):
        run = min(local_block.run_length, end - begin)
        for number, at in enumerate(range(begin, end, run)):
            own = whole.flatten()[start + number * 6 :][:run]
            assert own.tolist() == block[at : at + run].tolist()
            seen += own.tolist()
    assert seen == block.tolist()


def test_a_lost_rank_takes_its_tensor_group_along() -> None:
    restarts = Restarts(3, num_ranks=4, group_size=2)
    config = LearnerConfig(ranks=4, tensor_parallel=2)
    left = []
    for version in (1, 2):
        restarts.count(RankNotStarted("rank 1 failed", 1), version)
        fewer = restarts._fewer(config)
        left.append((fewer.ranks, fewer.tensor_parallel))
    assert left == [(2, 2), (1, 1)]
    assert restarts.lost_gpus == {1, 2}
