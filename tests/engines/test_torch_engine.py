"""The in-process engine: batches of whoever waits, seeds of their own, one version a batch."""

import asyncio
import itertools
import threading
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from vla_rl.engines import (
    DeviceLane,
    EngineConfig,
    TorchActionEngine,
    TorchChatEngine,
    make_torch_engine,
)
from vla_rl.models.language import TinyConfig, tiny as tiny_speaker
from vla_rl.models.openvla_oft import OpenVlaOft
from vla_rl.types import Observation, Sampling

MakeObservation = Callable[[int], Observation]


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop turn until `condition` holds; the test's deadline is the limit."""
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0)


async def test_whoever_waits_while_the_device_is_busy_goes_into_one_batch(
    policy: OpenVlaOft, lane: DeviceLane, make_observation: MakeObservation
) -> None:
    go_on = threading.Event()
    async with (
        asyncio.timeout(30),
        TorchActionEngine(policy, lane, EngineConfig(max_batch=8)) as engine,
    ):
        busy = asyncio.create_task(lane.run(go_on.wait, 20))
        first = asyncio.create_task(engine.act(make_observation(9)))
        await until(lambda: engine.stats().num_batches == 1)
        waiting = [asyncio.create_task(engine.act(make_observation(seed))) for seed in range(8)]
        await until(lambda: engine.stats().num_queued == 8)
        go_on.set()
        await asyncio.gather(busy, first, *waiting)
        assert engine.stats().batch_sizes == {1: 1, 8: 1}


async def test_deterministic_decisions_are_equal_to_the_last_bit(
    policy: OpenVlaOft, lane: DeviceLane, make_observation: MakeObservation
) -> None:
    config = EngineConfig(is_deterministic=True)
    async with asyncio.timeout(30), TorchActionEngine(policy, lane, config) as engine:
        crowd = await asyncio.gather(
            *(engine.act(make_observation(seed), Sampling(seed=seed)) for seed in range(4))
        )
        assert engine.stats().batch_sizes == {1: 4}
        for seed in reversed(range(4)):
            alone = await engine.act(make_observation(seed), Sampling(seed=seed))
            np.testing.assert_array_equal(alone.log_probs, crowd[seed].log_probs)


async def test_greedy_takes_the_most_likely_tokens_whatever_the_seed(
    policy: OpenVlaOft, lane: DeviceLane, make_observation: MakeObservation
) -> None:
    with torch.inference_mode():
        # 1024 ids, 16 bins
        best = policy.network(policy.prepare([make_observation(0)])).argmax(-1)[0] + 1008
    async with asyncio.timeout(30), TorchActionEngine(policy, lane, EngineConfig()) as engine:
        for seed in range(3):
            chunk = await engine.act(
                make_observation(0), Sampling(greedy=True, seed=seed, temperature=1.6)
            )
            assert chunk.tokens.tolist() == best.tolist()


async def test_a_batch_sees_one_version_and_its_weights(
    policy: OpenVlaOft, lane: DeviceLane, make_observation: MakeObservation
) -> None:
    """Weights are exchanged as often as possible while decisions are made.

    Each must come from those it names.
    """
    others = [policy.copy() for _ in range(3)]
    for scale, other in enumerate(others):
        with torch.no_grad():
            other.network.language_model.lm_head.weight.mul_(1.0 + scale)
    observation, sampling = make_observation(0), Sampling(seed=4)
    expected = {}
    for version, other in enumerate(others):
        with torch.inference_mode():
            expected[version] = (
                other.sample(other.prepare([observation]), [sampling]).log_probs[0].numpy()
            )
    config = EngineConfig(is_deterministic=True)
    seen = set[int]()
    async with asyncio.timeout(60), TorchActionEngine(policy, lane, config) as engine:

        async def publish() -> None:
            for index in itertools.count():
                if index >= 30 and len(seen) > 1:
                    return
                version = index % 3
                await lane.run(engine.apply_weights, others[version].network, version)

        publishing = asyncio.create_task(publish())
        while not publishing.done():
            chunk = await engine.act(observation, sampling)
            np.testing.assert_allclose(chunk.log_probs, expected[chunk.weight_version], atol=1e-5)
            seen.add(chunk.weight_version)
        await publishing


async def test_a_wrong_observation_is_refused_and_the_engine_goes_on(
    policy: OpenVlaOft, lane: DeviceLane, make_observation: MakeObservation
) -> None:
    async with asyncio.timeout(30), TorchActionEngine(policy, lane, EngineConfig()) as engine:
        with pytest.raises(ValueError, match=r"observation\['image'\] is NoneType"):
            await engine.act({"instruction": "go"})
        assert (await engine.act(make_observation(0))).tokens.shape == (4,)


class Recorded:
    """A policy that says its network is on a GPU, and remembers where its recordings were made and
    given up.
    """

    def __init__(self) -> None:
        self.network = types.SimpleNamespace(
            parameters=lambda: iter([types.SimpleNamespace(device=torch.device("cuda"))])
        )
        self.asked: list[tuple[bool, str]] = []

    def replay_acting(self, is_wanted: bool) -> None:
        self.asked.append((is_wanted, threading.current_thread().name))


async def test_recordings_are_given_up_on_the_lane_also_where_the_owner_is_cancelled(
    lane: DeviceLane,
) -> None:
    model: Any = Recorded()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0), TorchActionEngine(model, lane, EngineConfig()):
            await asyncio.Event().wait()
    assert [is_wanted for is_wanted, _ in model.asked] == [True, False]
    assert model.asked[1][1].startswith("device-lane")


async def test_leaving_cancels_nothing_half_way_and_later_calls_are_refused(
    policy: OpenVlaOft, lane: DeviceLane, make_observation: MakeObservation
) -> None:
    async with asyncio.timeout(30):
        async with TorchActionEngine(policy, lane, EngineConfig()) as engine:
            await engine.act(make_observation(0))
        with pytest.raises(RuntimeError, match="not open"):
            await engine.act(make_observation(0))


async def test_the_engine_suits_the_model(policy: OpenVlaOft, lane: DeviceLane) -> None:
    speaker = tiny_speaker(TinyConfig(), ["yes", "no"], seed=0)
    assert isinstance(make_torch_engine(speaker, lane, EngineConfig()), TorchChatEngine)
    assert isinstance(make_torch_engine(policy, lane, EngineConfig()), TorchActionEngine)
