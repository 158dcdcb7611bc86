"""The memory of a rank is estimated as torch's tracker counts it on rank 0 of a fake group."""

from collections.abc import Iterator
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.gpu.tracked_memory import StorageTracker
from vla_rl.learning import LearnerConfig, OptimizerConfig
from vla_rl.learning.rank_memory import PolicySize, rank_memory
from vla_rl.learning.sharded.parallel import ShardedModule
from vla_rl.learning.sharded.shared_training import SharedTraining

WIDTH, NUM_BLOCKS = 128, 48


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
    """Bytes at the peak of two updates of two micro-batches each."""
    network = Trunk().to(dtype)
    module = Whole(network)
    sharded = ShardedModule(module, 4, shard, blocks=list(network.blocks), dtype=dtype)
    training = SharedTraining(network, sharded, OptimizerConfig())
    tracker = StorageTracker()
    tracker.track_external(*module.parameters())
    with tracker:
        for _ in range(2):
            training.begin(clear=True)
            for is_last in (False, True):
                sharded.begin_pass(is_last=is_last)
                torch.autograd.backward(module(torch.zeros(1, WIDTH, dtype=dtype)).sum())
            training.step()
    peaks: dict[Any, dict[str, int]] = tracker.get_tracker_snapshot("peak")
    return max(of_device["Total"] for of_device in peaks.values())


@pytest.mark.usefixtures("four_ranks")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shard", ["gradients", "weights", "replicas"])
def test_the_estimate_is_within_5_percent_of_torchs_tracker(
    shard: Literal["gradients", "weights", "replicas"], dtype: torch.dtype
) -> None:
    block = WIDTH * WIDTH
    size = PolicySize(NUM_BLOCKS * block, 0, dtype.itemsize, block, block)
    estimate = rank_memory(size, LearnerConfig(ranks=4, shard=shard)).total
    if shard == "weights":
        estimate += 2 * block * dtype.itemsize  # the page's two gathered blocks
    assert estimate == pytest.approx(tracked_peak(shard, dtype), rel=0.05)
