"""New weights go from the device lane to the engines: at once, later, or not at all."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fake_llm import FakeReplica
from small_policies import completing_policy
from torch import Tensor, nn

from vla_rl.engines import DeviceLane, EngineConfig
from vla_rl.engines.vllm import VllmChatEngine, VllmConfig
from vla_rl.engines.vllm.publication import Publication, ServedVersion, WeightPublisher
from vla_rl.engines.vllm.staging import MappedWeights
from vla_rl.errors import CheckpointError
from vla_rl.models.vllm import serve


class Way:
    """A publisher without an engine, and what it works on."""

    def __init__(self) -> None:
        self.publication = Publication(VllmConfig(), "drain", "host")
        self.version = ServedVersion(0)
        self.publisher = WeightPublisher(tensors, self.publication, self.version, lambda: ())

    def newest(self) -> Tensor:
        assert self.publication.current is not None
        return dict(MappedWeights(self.publication.current).named_tensors())["weight"].clone()


def tensors(network: nn.Module) -> dict[str, Tensor]:
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
