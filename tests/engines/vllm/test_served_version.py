"""Engines apply new weights while the learner waits, or beside its next update."""

import asyncio
from typing import Any

import pytest
import torch
from fake_llm import FakeReplica
from small_policies import speaking_policy

from vla_rl.engines import DeviceLane, EngineConfig
from vla_rl.engines.vllm import VllmChatEngine, VllmConfig
from vla_rl.engines.vllm.publication import ServedVersion
from vla_rl.models.vllm import serve


async def test_the_learner_waits_for_a_version_unless_it_goes_ahead() -> None:
    version, may_apply, heard = ServedVersion(0), asyncio.Event(), list[int]()
    version.when_served(lambda: heard.append(version.now))

    async def apply(number: int) -> None:
        await may_apply.wait()
        version.note(number)

    async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(version.begin(1, apply(1), tasks))
        await asyncio.sleep(0)
        assert (waiting.done(), version.now, version.coming) == (False, 0, 0)
        may_apply.set()
        await waiting
        may_apply.clear()
        version.goes_ahead = True
        await version.begin(2, apply(2), tasks)
        assert (version.now, version.coming) == (1, 2)
        may_apply.set()
        await version.arrive()
        assert (version.now, version.coming) == (2, 2)
    assert heard == [1, 2]


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
    policy = speaking_policy()
    async with asyncio.timeout(50), DeviceLane(1) as lane:
        engine = VllmChatEngine(serve(policy), lane, config)
        engine.go_ahead()

        def publish(version: int) -> None:
            """Publish as one process or as ranks do."""
            if not is_shared:
                engine.adopt(policy.network, version)
                return
            assert engine.share(policy.network, version) is not None
            engine.adopt_shared(version)

        async with engine:
            drained = replicas[0].llm.drained
            drained.clear()
            await lane.run(publish, 1)
            assert (engine.weight_version, engine.coming_version) == (0, 1)
            # the memory of version 0 is read until then, and a third version has no other
            second = asyncio.create_task(lane.run(publish, 2))
            await asyncio.sleep(0.1)
            assert (second.done(), engine.coming_version) == (False, 1)
            drained.set()
            await second
            await engine.arrive()
            assert (engine.weight_version, engine.coming_version) == (2, 2)
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
    policy = speaking_policy()

    async def publish_broken() -> None:
        async with DeviceLane(1) as lane, VllmChatEngine(serve(policy), lane, config) as engine:
            engine.go_ahead()

            async def refuse(*_: Any) -> None:
                raise RuntimeError("the engines are gone")

            monkeypatch.setattr(engine._publication, "publish", refuse)
            with torch.no_grad():
                await lane.run(engine.adopt, policy.network, 1)
            await asyncio.sleep(20)

    async with asyncio.timeout(50):
        with pytest.raises(RuntimeError, match="the engines are gone"):
            await publish_broken()
