"""How calls, streams and actors end, the same in this loop, in a child process and on another host."""

import asyncio
import contextlib
import os
from pathlib import Path
from typing import Any

import pytest
from durations import at_some_pace
from sample_actors import (
    Counter,
    CrashLoop,
    FailsToStart,
    FailsToStop,
    Slow,
    Streamer,
    WritesOnStop,
)

from vla_rl.actors import (
    InLoop,
    Placement,
    RestartPolicy,
    Runtime,
    call_all,
    call_any,
    call_as_completed,
    list_waits,
    tell,
)
from vla_rl.errors import ActorDied, ActorFrozen

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(60)]


async def until(condition: Any) -> None:
    """Wait for what the actor itself reports."""
    async with asyncio.timeout(20):
        while not await condition():  # noqa: ASYNC110  each round is a message to the actor and back
            await asyncio.sleep(0)


async def test_cancelling_a_call_cancels_it_in_the_actor(
    runtime: Runtime, counter: Counter
) -> None:
    call = asyncio.create_task(counter.wait_for_gate("late"))
    await asyncio.sleep(0)
    await counter.cancelled()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call

    async def is_cancelled() -> bool:
        return await counter.cancelled() == ["late"]

    await until(is_cancelled)
    assert await counter.add(1) == 4
    assert runtime.info(counter).num_pending == 0


async def test_cancelling_a_call_that_waits_behind_another_keeps_it_from_running(
    counter: Counter,
) -> None:
    blocker = asyncio.create_task(counter.wait_for_gate("blocker"))
    queued = asyncio.create_task(counter.add(100))
    await counter.cancelled()
    queued.cancel()
    await asyncio.wait([queued])
    await counter.open_gate()
    assert await blocker == "blocker"
    assert await counter.total() == 3


async def test_a_full_mailbox_makes_the_sender_wait(runtime: Runtime, placement: Placement) -> None:
    counter = await runtime.spawn(Counter, placement=placement, mailbox=2)
    calls = [asyncio.create_task(counter.wait_for_gate("a")), asyncio.create_task(counter.add(1))]
    third = asyncio.create_task(counter.add(2))
    await asyncio.sleep(0)
    info = runtime.info(counter)
    assert (info.num_pending, info.num_waiting) == (2, 1)
    calls[0].cancel()
    assert await third == 3
    assert await calls[1] == 1


async def test_a_call_past_its_deadline_raises_actor_frozen_and_ends_the_actor(
    runtime: Runtime, placement: Placement
) -> None:
    counter = await runtime.spawn(Counter, placement=placement, deadline_s=0.2)
    with pytest.raises(ActorFrozen, match=r"wait_for_gate did not answer within 0\.2 s"):
        await counter.wait_for_gate("never")
    with pytest.raises(ActorFrozen):
        await counter.total()


async def test_a_frozen_actor_is_replaced_within_its_policy(
    runtime: Runtime, placement: Placement
) -> None:
    deadlines_s = {"wait_for_gate": 0.3}
    counter = await runtime.spawn(
        Counter, 7, placement=placement, deadlines_s=deadlines_s, restart=RestartPolicy()
    )
    with pytest.raises(ActorFrozen):
        await counter.wait_for_gate("never")
    assert await counter.total() == 7
    assert runtime.info(counter).num_restarts == 1


async def test_the_wait_behind_other_calls_does_not_count_towards_the_deadline(
    runtime: Runtime, placement: Placement
) -> None:
    async def twelve_calls(scale: float) -> None:
        counter = await runtime.spawn(Counter, placement=placement, deadline_s=0.5 * scale)
        async with asyncio.TaskGroup() as group:
            for _ in range(12):
                group.create_task(counter.block(0.06 * scale))  # 0.72 s in all

    await at_some_pace(twelve_calls)


async def test_waits_for_an_answer_are_listed(counter: Counter) -> None:
    call = asyncio.create_task(counter.wait_for_gate("x"), name="episode 12")
    await asyncio.sleep(0)
    assert ("episode 12", "counter.wait_for_gate") in [(wait.who, wait.on) for wait in list_waits()]
    await counter.open_gate()
    await call
    assert [wait for wait in list_waits() if wait.on.startswith("counter.")] == []


async def test_call_all_answers_in_the_order_of_the_actors(
    runtime: Runtime, placement: Placement
) -> None:
    counters = [await runtime.spawn(Counter, start, placement=placement) for start in (10, 20, 30)]
    assert await call_all(counters, Counter.add, 1) == [11, 21, 31]


async def test_call_all_raises_the_first_error_and_cancels_the_rest(
    runtime: Runtime, placement: Placement
) -> None:
    counters = [await runtime.spawn(Counter, placement=placement) for _ in range(2)]
    await runtime.kill(counters[1])
    with pytest.raises(ActorDied):
        await call_all(counters, Counter.wait_for_gate, "x")

    async def is_cancelled() -> bool:
        return await counters[0].cancelled() == ["x"]

    await until(is_cancelled)


async def test_call_any_takes_the_first_answer_and_cancels_the_rest(
    runtime: Runtime, placement: Placement
) -> None:
    counters = [await runtime.spawn(Counter, placement=placement) for _ in range(2)]
    await counters[1].open_gate()
    assert await call_any(counters, Counter.wait_for_gate, "x") == "x"

    async def is_cancelled() -> bool:
        return await counters[0].cancelled() == ["x"]

    await until(is_cancelled)


async def test_call_as_completed_gives_each_answer_with_its_actor(
    runtime: Runtime, placement: Placement
) -> None:
    slow, fast = [await runtime.spawn(Counter, placement=placement) for _ in range(2)]
    await fast.open_gate()
    finished = []
    async for actor, answer in call_as_completed([slow, fast], Counter.wait_for_gate, "x"):
        finished.append((actor, answer))
        await slow.open_gate()
    assert finished == [(fast, "x"), (slow, "x")]


async def test_tell_does_not_wait_for_the_answer(counter: Counter) -> None:
    await tell(counter, Counter.wait_for_gate, "told")
    await counter.open_gate()
    assert await counter.add(1) == 4


async def test_an_error_that_nobody_awaits_is_logged(
    counter: Counter, caplog: pytest.LogCaptureFixture
) -> None:
    await tell(counter, Counter.raise_value_error, "unheard")
    await counter.total()
    assert "a call sent with tell() failed" in caplog.text


async def test_a_stream_gives_every_item_in_order(runtime: Runtime, placement: Placement) -> None:
    streamer = await runtime.spawn(Streamer, placement=placement)
    assert [number async for number in streamer.count(100)] == list(range(100))


async def test_a_stream_gives_arrays(runtime: Runtime, placement: Placement) -> None:
    streamer = await runtime.spawn(Streamer, placement=placement)
    means = [frame.mean() async for frame in streamer.frames(5, (100, 200, 3))]
    assert means == [0.0, 1.0, 2.0, 3.0, 4.0]


async def test_an_error_ends_a_stream_after_its_items(
    runtime: Runtime, placement: Placement
) -> None:
    streamer = await runtime.spawn(Streamer, placement=placement)
    stream = streamer.count_and_fail(3)
    assert [await anext(stream) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ValueError, match="no more numbers"):
        await anext(stream)


async def test_a_consumer_that_does_not_read_pauses_the_stream(
    runtime: Runtime, placement: Placement
) -> None:
    streamer = await runtime.spawn(Streamer, placement=placement)
    stream = streamer.count_concurrently(10_000)
    assert await anext(stream) == 0
    previous = -1
    while (made := await streamer.made()) != previous:
        previous = made
    assert made <= 17  # a window of 16 items, and one that waits for credit
    await stream.aclose()  # type: ignore[attr-defined]


async def test_closing_a_stream_closes_the_generator_in_the_actor(
    runtime: Runtime, placement: Placement
) -> None:
    streamer = await runtime.spawn(Streamer, placement=placement)
    async with contextlib.aclosing(streamer.count(10_000)) as stream:  # type: ignore[type-var]
        async for number in stream:
            if number == 40:
                break
    assert await streamer.closed() == 1
    assert [number async for number in streamer.count(3)] == [0, 1, 2]


async def test_cancelling_a_consumer_stops_the_stream(
    runtime: Runtime, placement: Placement
) -> None:
    streamer = await runtime.spawn(Streamer, placement=placement)
    began = asyncio.Event()

    async def consume() -> None:
        async for _ in streamer.count(10_000):
            began.set()
            await asyncio.Event().wait()

    consumer = asyncio.create_task(consume())
    await began.wait()
    consumer.cancel()
    await asyncio.wait([consumer])
    del consumer

    async def is_closed() -> bool:
        return await streamer.closed() == 1

    await until(is_closed)


async def test_a_constructor_that_raises_raises_in_spawn(
    runtime: Runtime, placement: Placement
) -> None:
    with pytest.raises(ValueError, match="start is -1, expected >= 0") as raised:
        await runtime.spawn(Counter, -1, placement=placement)
    assert "in __init__" in raised.value.__notes__[0]


async def test_an_on_start_that_raises_raises_in_spawn(
    runtime: Runtime, placement: Placement
) -> None:
    with pytest.raises(RuntimeError, match="the simulator is not plugged in"):
        await runtime.spawn(FailsToStart, placement=placement)


async def test_an_actor_that_does_not_start_in_time_is_given_up(
    runtime: Runtime, placement: Placement
) -> None:
    with pytest.raises(TimeoutError, match=r"'slow' was not ready within 0\.8 s"):
        await runtime.spawn(Slow, name="slow", placement=placement, start_timeout_s=0.8)


async def test_a_stopped_actor_finishes_its_calls_and_runs_on_stop(
    runtime: Runtime, placement: Placement, tmp_path: Path
) -> None:
    file = tmp_path / "stopped"
    actor = await runtime.spawn(WritesOnStop, str(file), placement=placement)
    call = asyncio.create_task(actor.ping())
    await asyncio.sleep(0)
    await runtime.stop(actor)
    assert await call is None
    assert file.read_text() == "stopped"
    with pytest.raises(ActorDied, match="stopped by its owner"):
        await actor.ping()


async def test_an_on_stop_that_raises_is_an_error_in_the_log_and_the_actor_ends_all_the_same(
    placement: Placement, caplog: pytest.LogCaptureFixture
) -> None:
    async with asyncio.timeout(60):
        async with Runtime(stop_grace_s=30.0) as runtime:
            told = await runtime.spawn(FailsToStop, name="told", placement=placement)
            left = await runtime.spawn(FailsToStop, name="left", placement=placement)
            pids = {await told.ping(), await left.ping()} - {os.getpid()}
            await runtime.stop(told)
            info = runtime.info(told)
            assert (info.state, info.num_pending, info.num_rejected) == ("stopped", 0, 0)
            with pytest.raises(ActorDied, match="stopped by its owner"):
                await told.ping()
    for name in ("told", "left"):
        (record,) = [record for record in caplog.records if f"'{name}'" in record.getMessage()]
        assert (record.levelname, "failed while it ended" in record.getMessage()) == ("ERROR", True)
        assert record.exc_info is not None
        error = record.exc_info[1]
        assert isinstance(error, ValueError)
        assert str(error) == "the gripper does not open"
        assert "in on_stop" in error.__notes__[0]
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]  # noqa: ASYNC240
    assert {record.levelname for record in caplog.records} == {"ERROR"}


async def test_a_killed_actor_fails_its_calls_and_does_not_run_on_stop(
    runtime: Runtime, placement: Placement, tmp_path: Path
) -> None:
    file = tmp_path / "stopped"
    actor = await runtime.spawn(WritesOnStop, str(file), placement=placement)
    await runtime.kill(actor)
    with pytest.raises(ActorDied):
        await actor.ping()
    assert not file.exists()


async def test_leaving_the_runtime_stops_its_actors(placement: Placement, tmp_path: Path) -> None:
    file = tmp_path / "stopped"
    async with asyncio.timeout(60):
        async with Runtime(stop_grace_s=30.0) as runtime:
            actor = await runtime.spawn(WritesOnStop, str(file), placement=placement)
        with pytest.raises(ActorDied):
            await actor.ping()
    assert file.read_text() == "stopped"


async def test_an_error_in_the_body_leaves_the_runtime_as_itself(placement: Placement) -> None:
    async def fail_inside() -> None:
        async with asyncio.timeout(60), Runtime() as runtime:
            await runtime.spawn(Counter, placement=placement)
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        await fail_inside()


async def test_loop_lag_is_measured_where_the_actor_runs(
    runtime: Runtime, counter: Counter
) -> None:
    await counter.block(0.4)
    report = await runtime.loop_lag(counter)
    while report.max_s < 0.25:  # it is noticed with the next sample
        await asyncio.sleep(0.05)
        report = await runtime.loop_lag(counter)
    assert report.num_samples >= 1


async def test_an_actor_that_keeps_dying_ends_the_runtime(placement: Placement) -> None:
    if isinstance(placement, InLoop):
        pytest.skip("an actor in this loop has no process to exit from")

    async def crash_three_times() -> None:
        async with asyncio.timeout(60), Runtime() as runtime:
            policy = RestartPolicy(max_restarts=2, within_s=60.0)
            actor = await runtime.spawn(CrashLoop, placement=placement, restart=policy)
            for _ in range(3):
                with pytest.raises(ActorDied, match="exit code 9"):
                    await actor.exit()
            await asyncio.Event().wait()

    with pytest.raises(ActorDied, match="died more often than its restart policy allows"):
        await crash_three_times()
