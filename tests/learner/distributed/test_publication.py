"""Ranks write new weights into the memory of engines in other processes, in two phases."""

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from small_episodes import mlp, walk
from torch import Tensor, nn

from benchmarks.shared_updates import settings
from vla_rl.actors import Runtime
from vla_rl.engines import DeviceLane
from vla_rl.engines.vllm.staging import MappedWeights, Stage, StagedWeights
from vla_rl.engines.weight_shards import SharedParameters, find_trained_offsets
from vla_rl.learner import Learner
from vla_rl.learner.distributed import ShardedLearner


class RemoteEngine:
    """An engine that reads weights from memory, as those in other processes do."""

    def __init__(self, network: nn.Module, *, is_open_to_ranks: bool = True) -> None:
        self.network = nn.Module()
        self._stage, self._is_open = Stage(tensors_of(network), "host"), is_open_to_ranks
        self.current = self._stage.write_version(tensors_of(network), 0)
        self._shared: StagedWeights | None = None
        self.applied: list[str] = []

    def apply_weights(self, network: nn.Module, weight_version: int) -> None:
        """Take the weights of this process."""
        self.current = self._stage.write_version(tensors_of(network), weight_version, self.current)
        self.applied.append(f"model {weight_version}")

    def stage_shared(self, network: nn.Module, weight_version: int) -> SharedParameters | None:
        """Let ranks write."""
        if not self._is_open:
            return None
        found = self._stage.write_shared(network, tensors_of(network), weight_version, self.current)
        self._shared, slots = found or (None, None)
        return slots

    def apply_shared(self, weight_version: int) -> None:
        """Take what the ranks wrote."""
        assert self._shared is not None
        assert self._shared.version == weight_version
        self.current, self._shared = self._shared, None
        self.applied.append(f"ranks {weight_version}")

    def weights(self) -> dict[str, Tensor]:
        """Read what acts."""
        mapped = MappedWeights(self.current)
        assert mapped.checksum() == self._stage.checksum()
        return {name: tensor.clone() for name, tensor in mapped.named_tensors()}

    def close(self) -> None:
        """Free the memory."""
        self._stage.free_buffers()


def tensors_of(network: nn.Module) -> dict[str, Tensor]:
    return {f"engine.{name}": each.detach() for name, each in network.named_parameters()}


def assert_close(found: Mapping[str, Tensor], network: nn.Module) -> None:
    for name, each in tensors_of(network).items():
        assert found[name].numpy() == pytest.approx(each.numpy(), abs=1e-5)


@pytest.mark.asyncio(loop_scope="session")
async def test_ranks_write_into_engines_and_the_model_of_this_process_follows_at_the_end(
    runtime: Runtime,
) -> None:
    alone, shared = mlp(), mlp()
    trajectories, advantages = [walk(alone, 1, 3), walk(alone, 2, 4)], [1.0, -0.5]
    first = {name: each.clone() for name, each in tensors_of(shared.network).items()}
    engine = RemoteEngine(shared.network)
    async with DeviceLane(1) as lane, asyncio.timeout(200):
        one = Learner(alone, lane, settings())
        async with ShardedLearner(shared, runtime, lane, settings(ranks=2), [engine]) as two:
            for _ in range(2):
                for learner in (one, two):
                    await learner.update(trajectories, advantages)
                assert_close(engine.weights(), alone.network)
            assert all(
                torch.equal(each, first[name]) for name, each in tensors_of(shared.network).items()
            )
            # no step is taken, and the model here is old: the ranks write the same weights again
            await two.update(trajectories, [0.0, 0.0])
            assert engine.applied == ["ranks 1", "ranks 2", "ranks 3"]
            assert_close(engine.weights(), alone.network)
        assert_close(engine.weights(), shared.network)
        assert_close(tensors_of(shared.network), alone.network)
    engine.close()


@pytest.mark.asyncio(loop_scope="session")
async def test_an_engine_that_ranks_cannot_write_to_gets_the_weights_from_this_process(
    runtime: Runtime,
) -> None:
    alone, shared = mlp(), mlp()
    engine = RemoteEngine(shared.network, is_open_to_ranks=False)
    trajectories = [walk(alone, 1, 3), walk(alone, 2, 4)]
    async with DeviceLane(1) as lane, asyncio.timeout(200):
        one = Learner(alone, lane, settings())
        async with ShardedLearner(shared, runtime, lane, settings(ranks=2), [engine]) as two:
            for learner in (one, two):
                await learner.update(trajectories, [1.0, -0.5])
    assert engine.applied == ["model 1"]
    assert_close(engine.weights(), alone.network)
    engine.close()


def test_weights_that_are_merged_or_cut_up_have_no_place_of_their_own() -> None:
    network: Any = nn.Linear(2, 3)
    weight, bias = network.weight, network.bias
    tensors = {"w": weight.detach(), "b": bias.detach(), "again": bias.detach()}
    offsets = {"w": 0, "b": 64, "again": 128}
    assert find_trained_offsets(network, tensors, offsets) == {"weight": [0], "bias": [64, 128]}
    cut = {"b": bias.detach(), "up": weight.detach()[:1], "w": weight.detach()}
    assert find_trained_offsets(network, cut, {"b": 0, "up": 64, "w": 128}) is None
    merged = {"b": bias.detach(), "w": weight.detach() + 1.0}
    assert find_trained_offsets(network, merged, {"b": 0, "w": 64}) is None
    weight.requires_grad_(False)
    assert find_trained_offsets(network, merged, {"b": 0, "w": 64}) == {"bias": [0]}
