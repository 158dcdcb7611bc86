"""Ranks start, answer in the order of their calls, wait for one another, write new weights into the memory of
engines."""

import asyncio
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from small_episodes import mlp, walk
from torch import Tensor, nn

from benchmarks.shared_updates import settings
from vla_rl.actors import Runtime
from vla_rl.actors.wire.codec import Codec
from vla_rl.actors.wire.envelope import Kind
from vla_rl.engines import DeviceLane
from vla_rl.engines.vllm.staging import MappedWeights, Stage, StagedWeights
from vla_rl.engines.weight_shards import SharedParameters, find_trained_offsets
from vla_rl.errors import ConfigError
from vla_rl.graph import Slice
from vla_rl.learner import Learner, LearnerConfig
from vla_rl.learner.distributed import ShardedLearner
from vla_rl.learner.distributed.group import FOLDER_PREFIX, RankGroup
from vla_rl.learner.distributed.rank_hosts import RankAssignments, save_policy
from vla_rl.learner.distributed.rank_times import (
    RankTimes,
    describe_ranks,
    rank_metrics,
    rank_slices,
)
from vla_rl.learner.ranks import IN_FLIGHT, LocalRank, OneRank, Pass, compute_passes, in_order
from vla_rl.models.openvla_oft import OpenVlaOft, tiny


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.bool])
def test_a_tensor_is_sent_bit_for_bit_and_can_be_written_to(dtype: torch.dtype) -> None:
    codec, sent = Codec(), torch.arange(12).view(3, 4).T.to(dtype)
    read = codec.decode(
        codec.get_decoder(torch.Tensor), codec.encode(Kind.CALL, 0, 0, 1, sent, "rows")
    )
    assert read.dtype == dtype
    assert read.equal(sent)
    read[0] = 1
    with pytest.raises(TypeError, match=r"rows: .*BFloat16"):
        codec.encode(Kind.CALL, 0, 0, 1, sent.bfloat16(), "rows")


SLOW = RankTimes(
    jobs=[("update", 0.0, 8.0), ("step", 8.0, 9.0)],
    collectives=[("all-gather", 1.0, 1.5), ("reduce-scatter", 7.0, 8.0)],
    flops=600,
)
"""Computes 7.5 s of its 9 s."""

FAST = RankTimes(
    jobs=[("update", 0.0, 8.0), ("step", 8.0, 9.0)],
    collectives=[("all-gather", 0.5, 1.5), ("reduce-scatter", 4.0, 8.0)],
    flops=400,
)
"""Came half a second earlier to the first collective, and three seconds earlier to the second."""


def test_a_rank_that_comes_last_is_the_one_that_others_wait_for() -> None:
    metrics = rank_metrics([FAST, SLOW], 10.0, peak_flops=100.0)
    assert metrics == pytest.approx(
        {
            "rank/0/compute_s": 4.0,
            "rank/0/wait_s": 3.5,
            "rank/0/awaited_s": 0.0,
            "rank/0/mfu": 0.4,
            "rank/1/compute_s": 7.5,
            "rank/1/wait_s": 0.0,
            "rank/1/awaited_s": 3.5,
            "rank/1/mfu": 0.6,
            "ranks/communication_share": 0.15,
            "ranks/wait_share": 0.175,
        }
    )
    assert describe_ranks(metrics) == "ranks wait 18%, mostly for rank 1; communication 15%"


def test_ranks_without_a_collective_or_a_peak_have_the_rest_of_the_metrics() -> None:
    idle = RankTimes(jobs=[], collectives=[])
    metrics = rank_metrics([idle, idle], 2.0, None)
    assert set(metrics.values()) == {0.0}
    assert "rank/0/mfu" not in metrics
    assert describe_ranks({}) == ""


def test_the_timeline_has_two_lanes_a_rank() -> None:
    before = RankTimes(jobs=[("values", -2.0, -1.0)], collectives=[])
    lanes = rank_slices([before], [SLOW])
    assert [each.name for each in lanes["rank 0"]] == ["values", "update", "step"]
    assert lanes["rank 0, collectives"][1] == Slice("reduce-scatter", 7.0, 8.0)


async def test_answers_are_in_the_order_of_their_inputs_with_few_calls_at_a_time() -> None:
    running: list[int] = []
    most = 0

    async def call(number: int) -> int:
        nonlocal most
        running.append(number)
        most = max(most, len(running))
        for _ in range(5 - number):  # later ones are faster
            await asyncio.sleep(0)
        running.remove(number)
        return number * 10

    assert await in_order(call, range(5)) == [0, 10, 20, 30, 40]
    assert most == IN_FLIGHT


async def test_no_input_makes_no_call() -> None:
    async def call(number: int) -> int:
        raise AssertionError("there is nothing to call with")

    assert await in_order(call, []) == []


async def test_the_first_error_is_raised() -> None:
    async def call(number: int) -> int:
        if number == 1:
            raise ValueError("rank 1 refuses")
        return number

    with pytest.raises(ValueError, match="rank 1 refuses"):
        await in_order(call, range(3))


class Pair(OneRank):
    """Two ranks, of which the second has no row, and whose passes are collectives."""

    makes_idle_passes = True

    async def compute(self, work: Any, dealt: Any) -> Any:
        return [await work(number, parts) for number, parts in enumerate(dealt)]


async def test_a_rank_without_a_row_passes_the_shortest() -> None:
    passes: list[tuple[int, list[int], bool, bool]] = []

    async def call(rank: int, observations: Any, part: Pass) -> int:
        passes.append((rank, part.index.tolist(), part.is_idle, part.is_last))
        return rank

    async with DeviceLane() as lane:
        ranks, lengths = Pair(LocalRank(lane), lane), torch.tensor([7, 3, 5])
        dealt = [[torch.tensor([0, 1]), torch.tensor([2])], []]
        assert await compute_passes(ranks, dealt, lengths, [{}] * 3, call, begin=None) == [0, 0]
    assert passes == [
        (0, [0, 1], False, False),
        (0, [2], False, True),
        (1, [1], True, False),
        (1, [1], True, True),
    ]


def test_compiled_blocks_are_refused(tmp_path: Path) -> None:
    policy = OpenVlaOft.create(tiny(), seed=0)
    policy.compile_blocks()
    with pytest.raises(ConfigError, match=r"blocks are compiled, .*--learner\.ranks 1"):
        save_policy(policy, tmp_path, RankAssignments(()))
    assert not list(tmp_path.iterdir())


async def test_the_next_start_of_ranks_removes_the_policy_of_a_run_that_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left = tmp_path / f"{FOLDER_PREFIX}of-a-killed-run"
    left.mkdir()
    (left / "policy").write_bytes(bytes(10))
    async with Runtime() as runtime:
        with pytest.raises(AttributeError):
            await RankGroup(runtime, LearnerConfig(ranks=1)).start_ranks(object())
    assert os.listdir(tmp_path) == []


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


def half_trained() -> nn.Module:
    made = nn.Sequential(nn.Linear(2, 3, bias=False), nn.Linear(3, 2, bias=False))
    made[1].weight.requires_grad_(False)
    return made


def named_tensors(made: nn.Module) -> dict[str, Tensor]:
    return {name: each.detach() for name, each in made.named_parameters()}


def test_only_trained_parameters_have_places() -> None:
    made = half_trained()
    offsets = {"0.weight": 64, "1.weight": 128}
    assert find_trained_offsets(made, named_tensors(made), offsets) == {"0.weight": [64]}


def test_a_parameter_under_two_names_has_two_places() -> None:
    made = half_trained()
    tensors = {**named_tensors(made), "head": made[0].weight.detach()}
    offsets = {"0.weight": 0, "1.weight": 64, "head": 128}
    assert find_trained_offsets(made, tensors, offsets) == {"0.weight": [0, 128]}


def test_a_parameter_that_engines_read_in_parts_has_no_place() -> None:
    made = half_trained()
    upper, lower = made[0].weight.detach().split([1, 2])
    assert find_trained_offsets(made, {"a": upper, "b": lower}, {"a": 0, "b": 8}) is None


def test_a_trained_parameter_that_engines_do_not_read_has_no_place() -> None:
    made = half_trained()
    merged = {"0.weight": made[0].weight.detach() + 1.0}
    assert find_trained_offsets(made, merged, {"0.weight": 0}) is None
