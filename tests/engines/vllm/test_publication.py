"""New weights go from the device lane or learner ranks through shared memory to the engines: every byte, at once,
later, or not at all."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import msgspec
import pytest
import torch
from fake_llm import FakeReplica
from processes import named_memory_of
from small_policies import completing_policy
from torch import Tensor, nn

from benchmarks import conversations
from benchmarks.shared_updates import settings
from vla_rl.actors import Runtime
from vla_rl.engines import DeviceLane, EngineConfig
from vla_rl.engines.config import WeightRoute
from vla_rl.engines.vllm import VllmChatEngine, VllmConfig
from vla_rl.engines.vllm.publication import Publication, ServedVersion, WeightPublisher
from vla_rl.engines.vllm.staging import GpuMemory, MappedWeights, Stage, StagedWeights
from vla_rl.errors import CheckpointError, ConfigError
from vla_rl.learner.distributed import ShardedLearner
from vla_rl.models.vllm import serve


class Way:
    """A publisher without an engine, and what it works on."""

    def __init__(self) -> None:
        self.publication = Publication(VllmConfig(), "drain", "host")
        self.version = ServedVersion(0)
        self.publisher = WeightPublisher(tensors_of, self.publication, self.version, lambda: ())

    def newest(self) -> Tensor:
        assert self.publication.current is not None
        return dict(MappedWeights(self.publication.current).named_tensors())["weight"].clone()


def tensors_of(network: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach() for name, tensor in network.named_parameters()}


def filled(value: float) -> nn.Module:
    network = nn.Linear(2, 2, bias=False)
    nn.init.constant_(network.weight, value)
    return network


@pytest.fixture
def way() -> Iterator[Way]:
    way = Way()
    yield way
    way.publication.free_memory()


async def test_the_lane_waits_until_engines_that_are_open_have_a_version(way: Way) -> None:
    async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
        way.publisher.start_publishing(tasks)
        async with way.publication.turn:  # a starting engine joins
            applying = tasks.create_task(
                asyncio.to_thread(way.publisher.apply_weights, filled(3.0), 1)
            )
            await asyncio.sleep(0.05)
            assert (applying.done(), way.version.now) == (False, 0)
        await applying
    assert (way.version.now, len(way.publication.times)) == (1, 1)
    assert way.newest().eq(3.0).all()


async def test_a_version_is_only_stored_before_engines_open_and_after_they_close(way: Way) -> None:
    way.publisher.apply_weights(filled(1.0), 1)
    assert (way.version.now, way.newest().eq(1.0).all()) == (1, True)
    async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
        way.publisher.start_publishing(tasks)
        way.publisher.stop_publishing()
        way.publisher.apply_weights(filled(2.0), 2)
    assert (way.version.now, way.newest().eq(2.0).all()) == (2, True)
    assert way.publication.times == []


async def test_a_version_that_no_engine_takes_is_raised_on_the_lane_and_the_last_one_stays(
    way: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*_: Any) -> None:
        raise CheckpointError("the engines refuse it")

    way.publisher.apply_weights(filled(1.0), 1)
    monkeypatch.setattr(way.publication, "publish", refuse)
    async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
        way.publisher.start_publishing(tasks)
        with pytest.raises(CheckpointError, match="the engines refuse it"):
            await asyncio.to_thread(way.publisher.apply_weights, filled(2.0), 2)
    assert (way.version.now, way.newest().eq(1.0).all()) == (1, True)


def test_weights_that_others_write_are_served_once_they_are_adopted(way: Way) -> None:
    network = filled(1.0)
    offsets = way.publisher.stage_shared(network, 1)
    assert offsets is not None
    (begin,) = offsets.begins["weight"]
    memory = torch.from_file(offsets.path, shared=True, size=4, dtype=torch.float32)
    assert begin == 0
    memory.fill_(7.0)
    assert way.publication.current is None
    way.publisher.apply_shared(1)
    assert (way.version.now, way.newest().eq(7.0).all()) == (1, True)


def test_a_version_that_was_not_shared_is_refused(way: Way) -> None:
    with pytest.raises(CheckpointError, match="none is shared, expected version 1"):
        way.publisher.apply_shared(1)
    way.publisher.stage_shared(filled(1.0), 1)
    with pytest.raises(CheckpointError, match="version 1 is shared, expected version 2"):
        way.publisher.apply_shared(2)
    assert way.version.now == 0


async def test_the_learner_waits_for_a_version_unless_it_goes_ahead() -> None:
    version, may_apply, versions = ServedVersion(0), asyncio.Event(), list[int]()
    version.on_weights_applied(lambda: versions.append(version.now))

    async def apply(number: int) -> None:
        await may_apply.wait()
        version.mark_applied(number)

    async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(version.start_applying(1, apply(1), tasks))
        await asyncio.sleep(0)
        assert (waiting.done(), version.now, version.pending) == (False, 0, 0)
        may_apply.set()
        await waiting
        may_apply.clear()
        version.applies_in_background = True
        await version.start_applying(2, apply(2), tasks)
        assert (version.now, version.pending) == (1, 2)
        may_apply.set()
        await version.wait_until_idle()
        assert (version.now, version.pending) == (2, 2)
    assert versions == [1, 2]


@pytest.mark.needs_vllm
@pytest.mark.timeout(60)
@pytest.mark.parametrize("is_shared", [False, True])
async def test_an_update_begins_while_an_engine_still_drains(
    monkeypatch: pytest.MonkeyPatch, is_shared: bool
) -> None:
    replicas: list[FakeReplica] = []
    config = EngineConfig(kind="vllm", vllm=VllmConfig(update_mode="drain"))

    def new_replica(*_: Any) -> FakeReplica:
        replicas.append(FakeReplica("engine", config.vllm))
        return replicas[0]

    monkeypatch.setattr(VllmChatEngine, "_new_replica", new_replica)
    policy = completing_policy()
    async with asyncio.timeout(50), DeviceLane(1) as lane:
        engine = VllmChatEngine(serve(policy), lane, config)
        engine.apply_in_background()

        def publish(version: int) -> None:
            """Publish as one process or as ranks do."""
            if not is_shared:
                engine.apply_weights(policy.network, version)
                return
            assert engine.stage_shared(policy.network, version) is not None
            engine.apply_shared(version)

        async with engine:
            drained = replicas[0].llm.drained
            drained.clear()
            await lane.run(publish, 1)
            assert (engine.weight_version, engine.pending_version) == (0, 1)
            # the memory of version 0 is read until then, and a third version has no other
            second = asyncio.create_task(lane.run(publish, 2))
            await asyncio.sleep(0.1)
            assert (second.done(), engine.pending_version) == (False, 1)
            drained.set()
            await second
            await engine.wait_applied()
            assert (engine.weight_version, engine.pending_version) == (2, 2)
            assert [step for step in replicas[0].llm.done if step.startswith("version")] == [
                "version 0",
                "version 1",
                "version 2",
            ]


@pytest.mark.needs_vllm
@pytest.mark.timeout(60)
async def test_an_error_after_the_learner_went_ahead_ends_the_engines_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = EngineConfig(kind="vllm")
    monkeypatch.setattr(
        VllmChatEngine, "_new_replica", lambda *_: FakeReplica("engine", config.vllm)
    )
    policy = completing_policy()

    async def publish_broken() -> None:
        async with DeviceLane(1) as lane, VllmChatEngine(serve(policy), lane, config) as engine:
            engine.apply_in_background()

            async def refuse(*_: Any) -> None:
                raise RuntimeError("the engines are gone")

            monkeypatch.setattr(engine._publication, "publish", refuse)
            with torch.no_grad():
                await lane.run(engine.apply_weights, policy.network, 1)
            await asyncio.sleep(20)

    async with asyncio.timeout(50):
        with pytest.raises(RuntimeError, match="the engines are gone"):
            await publish_broken()


@pytest.mark.needs_vllm
@pytest.mark.proof
@pytest.mark.filterwarnings("ignore:Unclosed context:ResourceWarning")
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


def tensors(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "a": torch.randn(3, 5, generator=generator),
        "b": torch.randn(7, generator=generator).bfloat16(),
        "c": torch.tensor(seed),
    }


def read(staged: object) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in MappedWeights(staged).named_tensors()}  # type: ignore[arg-type]


def test_what_is_written_is_what_is_read() -> None:
    stage = Stage(tensors(1))
    staged = stage.write_version(tensors(2), version=4)
    assert staged.version == 4
    found = read(staged)
    for name, tensor in tensors(2).items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
    assert MappedWeights(staged).checksum() == stage.checksum()


def test_one_version_can_be_read_while_the_next_is_written() -> None:
    stage = Stage(tensors(1))
    current = stage.write_version(tensors(1), version=1)
    mapped = MappedWeights(current)
    for refused in (2, 3):  # written and not published: an engine that starts still reads version 1
        stage.write_version(tensors(refused), refused, current)
        assert torch.equal(dict(mapped.named_tensors())["a"], tensors(1)["a"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weights: weights.pop("b"), r"1 missing \['b'\]"),
        (lambda weights: weights.update(d=torch.ones(1)), r"1 unknown \['d'\]"),
        (
            lambda weights: weights.update(a=torch.ones(5, 3)),
            r"a is torch.float32 \[5, 3\], expected float32 \[3, 5\]",
        ),
        (lambda weights: weights.update(a=torch.ones(3, 5).double()), r"a is torch.float64"),
    ],
)
def test_weights_that_do_not_fit_are_refused_before_a_byte_is_written(
    change: object, message: str
) -> None:
    stage = Stage(tensors(1))
    staged = stage.write_version(tensors(1), version=1)
    wrong = tensors(2)
    change(wrong)  # type: ignore[operator]
    with pytest.raises(CheckpointError, match=message):
        stage.write_version(wrong, version=2)
    assert torch.equal(read(staged)["a"], tensors(1)["a"])


def test_what_engines_are_told_travels_as_plain_bytes() -> None:
    staged = Stage(tensors(1)).write_version(tensors(1), version=3)
    gpu = GpuMemory("GPU-1", 64, b"handle", 64, 0, b"counter", 0, b"event", True)
    for told in (staged, StagedWeights(gpu, 3, staged.offsets)):
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(told), type=StagedWeights) == told


def test_weights_of_a_cpu_cannot_go_through_a_gpu() -> None:
    with pytest.raises(
        ConfigError, match="weights_through is 'gpu', but the learner's weights are on cpu"
    ):
        Stage(tensors(1), route="gpu")


def test_memory_of_a_gpu_that_an_engine_does_not_see_is_refused() -> None:
    staged = StagedWeights(GpuMemory("GPU-0", 64, b"", 64, 0, b"", 0, b"", False), 1, ())
    with pytest.raises(
        CheckpointError, match=r"lie on GPU GPU-0, .* set weights_through to 'host'"
    ):
        MappedWeights(staged)


READER = """
import sys, msgspec
import vla_rl.engines.vllm.engine
from vla_rl.engines.vllm.staging import MappedWeights, StagedWeights
for line in iter(sys.stdin.buffer.readline, b""):
    staged = msgspec.msgpack.decode(bytes.fromhex(line.decode().strip()), type=StagedWeights)
    mapped = MappedWeights(staged)
    print(mapped.checksum(), {tensor.device.type for _, tensor in mapped.named_tensors()}, flush=True)
print("vllm" in sys.modules)
"""


@pytest.mark.parametrize(
    ("device", "route"),
    [
        ("cpu", "auto"),
        pytest.param(
            "cuda",
            "gpu",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
            ],
        ),
    ],
)
def test_another_process_reads_version_after_version(device: str, route: WeightRoute) -> None:
    stage = Stage({name: tensor.to(device) for name, tensor in tensors(0).items()}, route)
    with subprocess.Popen(
        [sys.executable, "-c", READER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    ) as reader:
        assert reader.stdin is not None
        assert reader.stdout is not None
        for version in range(1, 4):
            written = {name: tensor.to(device) for name, tensor in tensors(version).items()}
            staged = stage.write_version(written, version)
            reader.stdin.write(msgspec.msgpack.encode(staged).hex() + "\n")
            assert reader.stdout.readline() == f"{stage.checksum()} {{'{device}'}}\n"
        reader.stdin.close()
        assert reader.stdout.readline() == "False\n"  # engines are imported without vLLM itself
    stage.free_buffers()


def test_memory_that_is_gone_cannot_be_mapped() -> None:
    stage = Stage(tensors(1))
    staged = stage.write_version(tensors(1), version=1)
    stage.free_buffers()
    with pytest.raises(CheckpointError, match="cannot be opened"):
        MappedWeights(staged)


def test_the_memory_has_no_name_that_could_be_left_behind() -> None:
    named = SharedMemory(create=True, size=64)
    before = named_memory_of([os.getpid()])
    assert f"/dev/shm/{named.name}" in {str(path) for path in before}  # what would be seen
    stage = Stage(tensors(1))
    stage.write_version(tensors(1), version=1)
    assert named_memory_of([os.getpid()]) <= before
    named.close()
    named.unlink()
    stage.free_buffers()
