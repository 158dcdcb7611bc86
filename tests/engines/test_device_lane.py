"""The device is used by one thing at a time, in order, never stopped half-way; the in-process engine gives it batches
of whoever waits."""

import asyncio
import inspect
import itertools
import threading
import types
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import get_testing_overrides

from vla_rl.engines import (
    DeviceLane,
    EngineConfig,
    TorchActionEngine,
    TorchChatEngine,
    make_torch_engine,
)
from vla_rl.engines.device_lane import to_device, to_host
from vla_rl.models.language import TinyConfig, tiny as tiny_speaker
from vla_rl.models.openvla_oft import OpenVlaOft
from vla_rl.types import Observation, Sampling


async def test_work_runs_one_at_a_time_in_the_order_of_submission(lane: DeviceLane) -> None:
    log: list[str] = []

    def work(name: str) -> str:
        log.append(f"{name} begins")
        log.append(f"{name} ends")
        return threading.current_thread().name

    async with asyncio.timeout(10):
        names = await asyncio.gather(*(lane.run(work, letter) for letter in "abc"))
    assert log == [f"{letter} {verb}" for letter in "abc" for verb in ("begins", "ends")]
    assert set(names) == {"device-lane_0"}


async def test_inference_gets_its_turn_between_two_micro_batches(lane: DeviceLane) -> None:
    log: list[str] = []

    async def use(name: str) -> None:
        for _ in range(3):
            await lane.run(log.append, name)

    async with asyncio.timeout(10):
        await asyncio.gather(use("micro-batch"), use("inference"))
    assert log == ["micro-batch", "inference"] * 3


async def test_cancelling_the_await_does_not_stop_the_thread_and_closing_waits_for_it() -> None:
    started, go_on, log = threading.Event(), threading.Event(), list[str]()

    def work() -> None:
        started.set()
        go_on.wait(10)
        log.append("done")

    async with asyncio.timeout(20):
        async with DeviceLane() as lane:
            waiter = asyncio.create_task(lane.run(work))
            await asyncio.to_thread(started.wait, 10)
            waiter.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiter
            assert log == []
            go_on.set()
        assert log == ["done"]


async def test_what_is_cancelled_before_its_turn_never_runs(lane: DeviceLane) -> None:
    go_on, log = threading.Event(), list[str]()
    async with asyncio.timeout(20):
        first = asyncio.create_task(lane.run(go_on.wait, 10))
        second = asyncio.create_task(lane.run(log.append, "second"))
        await asyncio.sleep(0)
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        go_on.set()
        await first
        await lane.run(log.append, "third")
    assert log == ["third"]


async def test_a_failure_after_a_cancellation_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    started, go_on = threading.Event(), threading.Event()

    def work() -> None:
        started.set()
        go_on.wait(10)
        raise ValueError("nobody hears me")

    async with asyncio.timeout(20), DeviceLane() as lane:
        waiter = asyncio.create_task(lane.run(work))
        await asyncio.to_thread(started.wait, 10)
        waiter.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiter
        go_on.set()
    assert "nobody hears me" in caplog.text


async def test_exceptions_reach_the_caller_and_the_lane_goes_on(lane: DeviceLane) -> None:
    async with asyncio.timeout(10):
        with pytest.raises(ZeroDivisionError):
            await lane.run(divmod, 1, 0)
        assert await lane.run(divmod, 7, 2) == (3, 1)


async def test_the_next_input_is_prepared_while_this_one_is_used(lane: DeviceLane) -> None:
    prepared = {name: threading.Event() for name in "abc"}

    def prepare(name: str) -> str:
        prepared[name].set()
        return name.upper()

    seen = []
    async with asyncio.timeout(10), aclosing(lane.prepare_ahead(prepare, "abc")) as items:
        async for name, result in items:
            following = {"a": "b", "b": "c"}.get(name)
            if following:
                assert await asyncio.to_thread(prepared[following].wait, 5)
            seen.append(result)
    assert seen == ["A", "B", "C"]


async def test_it_computes_with_the_number_of_threads_it_was_given() -> None:
    async with asyncio.timeout(10), DeviceLane(num_threads=1) as lane:
        assert await lane.run(torch.get_num_threads) == 1


async def test_busy_seconds_are_kept_by_kind_of_work(lane: DeviceLane) -> None:
    async with asyncio.timeout(10):
        await lane.run(sum, range(200_000), work="act")
        await lane.run(sum, range(200_000), work="update")
    assert set(lane.busy_seconds()) == {"act", "update"}
    assert 0.0 < lane.busy_share() <= 1.0


def test_no_thread_is_no_choice() -> None:
    with pytest.raises(ValueError, match="num_threads is 0, expected at least 1"):
        DeviceLane(num_threads=0)


META = torch.device("meta")


class HostTensor:
    """A tensor on the host, of which only the calls of `to_device` exist; it notes them."""

    device = torch.device("cpu")

    def __init__(self, noted: list[str]) -> None:
        self._noted = noted

    def pin_memory(self) -> "HostTensor":
        self._noted.append("pinned")
        return self

    def to(self, device: torch.device, non_blocking: bool = False) -> "HostTensor":
        self._noted.append(f"{device.type}, non_blocking={non_blocking}")
        return self


def test_a_copy_to_a_gpu_is_pinned_and_asynchronous() -> None:
    noted: list[str] = []
    tensor: Any = HostTensor(noted)
    to_device(tensor, torch.device("cuda"))
    assert noted == ["pinned", "cuda, non_blocking=True"]


def test_torch_has_the_calls_that_stand_ins_replace() -> None:
    known = get_testing_overrides()
    inspect.signature(known[torch.Tensor.pin_memory]).bind(torch.zeros(1))
    torch.zeros(1).to(META, non_blocking=True)


def test_on_a_cpu_nothing_is_copied() -> None:
    tensor = torch.ones(3)
    assert to_device(tensor, torch.device("cpu")) is tensor
    assert to_host(tensor)[0] is tensor


def test_numbers_arrive_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [
        torch.tensor([True, False, True]),
        torch.tensor([[2**62 + 1, -1]]),
        torch.tensor(0.1),
        torch.tensor([1.5, -0.0], dtype=torch.bfloat16),
    ]
    # as on a device, whose tensors are not the host's
    monkeypatch.setattr(torch.Tensor, "device", property(lambda _: META))
    found = to_host(*tensors)
    monkeypatch.undo()
    for sent, received in zip(tensors, found, strict=True):
        assert received.dtype == sent.dtype
        assert torch.equal(received, sent)


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
