"""Memory and arithmetic of a rank are estimated as torch counts them on rank 0 of a fake group."""

from collections.abc import Callable, Iterator
from typing import Any, Literal

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.gpu.tracked_memory import StorageTracker
from vla_rl.learner import LearnerConfig, OptimizerConfig
from vla_rl.learner.distributed.sharding import (
    LocalOperations,
    Meshes,
    PolicyModule,
    ShardedModule,
    cut_layers,
    get_blocks,
)
from vla_rl.learner.distributed.shared_training import SharedTraining
from vla_rl.learner.estimates.rank_memory import PolicySize, measure_policy, rank_memory
from vla_rl.learner.flops import flop_counter
from vla_rl.models.language import TinyConfig, tiny

WIDTH, NUM_BLOCKS = 128, 32


class Trunk(nn.Module):
    """Many equal blocks, and next to no activations."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_BLOCKS))

    def forward(self, rows: Tensor) -> Tensor:
        for block in self.blocks:
            rows = block(rows)
        return rows


class Whole(nn.Module):
    """The module that ranks share."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, rows: Tensor) -> Any:
        return self.network(rows)


@pytest.fixture(scope="module")
def four_ranks() -> Iterator[None]:
    """A group of four, of which only the first is there: its collectives move nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


def tracked_peak(shard: Literal["gradients", "weights", "replicas"], dtype: torch.dtype) -> int:
    """Bytes at the peak of updates of a trunk."""
    network = Trunk().to(dtype)
    module = Whole(network)
    meshes = Meshes(LearnerConfig(ranks=4, shard=shard), "cpu")
    sharded = ShardedModule(module, meshes, shard, blocks=list(network.blocks), dtype=dtype)
    training = SharedTraining(network, sharded, OptimizerConfig())
    return peak_of(training, lambda: module(torch.zeros(1, WIDTH, dtype=dtype)).sum())


def peak_of(training: SharedTraining, loss: Callable[[], Tensor]) -> int:
    """Bytes at the peak of two updates.

    The second has two micro-batches: gradients of the first are there when it computes.
    """
    tracker = StorageTracker()
    tracker.track_external(*training.sharded.module.parameters())
    with tracker:
        for micro_batches in ((True,), (False, True)):
            training.gather_weights(clear=True)
            for is_last in micro_batches:
                training.sharded.begin_pass(is_last=is_last)
                torch.autograd.backward(loss())
            training.optim_step()
    peaks: dict[Any, dict[str, int]] = tracker.get_tracker_snapshot("peak")
    return max(of_device["Total"] for of_device in peaks.values())


@pytest.mark.usefixtures("four_ranks")
@pytest.mark.parametrize(
    ("shard", "dtype"),
    [
        ("gradients", torch.float32),
        ("weights", torch.bfloat16),
        ("replicas", torch.bfloat16),
        pytest.param("gradients", torch.bfloat16, marks=pytest.mark.proof),
        pytest.param("weights", torch.float32, marks=pytest.mark.proof),
        pytest.param("replicas", torch.float32, marks=pytest.mark.proof),
    ],
)
def test_the_estimate_is_within_5_percent_of_torchs_tracker(
    shard: Literal["gradients", "weights", "replicas"], dtype: torch.dtype
) -> None:
    block = WIDTH * WIDTH
    size = PolicySize(NUM_BLOCKS * block, 0, dtype.itemsize, block, block)
    estimate = rank_memory(size, LearnerConfig(ranks=4, shard=shard)).total
    if shard == "weights":
        estimate += 2 * block * dtype.itemsize  # the page's two gathered blocks
    assert estimate == pytest.approx(tracked_peak(shard, dtype), rel=0.05)


@pytest.mark.usefixtures("four_ranks")
@pytest.mark.parametrize("shard", ["gradients", pytest.param("replicas", marks=pytest.mark.proof)])
def test_ranks_that_share_layers_need_and_compute_a_part_of_them(
    shard: Literal["gradients", "replicas"],
) -> None:
    shape = TinyConfig(hidden_size=128, num_layers=12, intermediate_size=512, vocab_size=300)
    policy = tiny(shape, ["a"], seed=0)
    batch = policy.prepare([{"prompt_tokens": np.arange(1, 4)}])

    module = PolicyModule(policy)

    def score() -> Tensor:
        return module.log_probs(batch, torch.tensor([[5]]), torch.ones(1))[0].sum()

    def num_flops() -> int:
        with flop_counter() as counter, LocalOperations(), torch.no_grad():
            score()
        return int(counter.get_total_flops())

    config = LearnerConfig(ranks=4, tensor_parallel=2, shard=shard)
    size, whole = measure_policy(policy, config), num_flops()
    meshes = Meshes(config, "cpu")
    assert meshes.tensor is not None
    cut_layers(policy.network, policy.tensor_plan(), meshes.tensor)
    tokens, heads = 3 + 1, 2 * 2 * 128 * 4 * 4  # products with keys, and with values
    assert whole - num_flops() == size.num_cut * tokens + shape.num_layers * heads // 2
    blocks, dtype = get_blocks(policy.network), torch.float32
    sharded = ShardedModule(module, meshes, shard, blocks=blocks, dtype=dtype)
    training = SharedTraining(policy.network, sharded, OptimizerConfig())
    estimate = rank_memory(size, config).total
    assert estimate == pytest.approx(peak_of(training, score), rel=0.05)
