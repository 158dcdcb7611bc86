"""A call that begins as its message arrives behaves as one that begins in its task."""

import asyncio

import pytest
from sample_actors import Counter, SlowToStart, Waiter

from vla_rl.actors import ChildProcess, Runtime, begin_call
from vla_rl.actors.calls.running_calls import EagerCall


async def test_a_timeout_that_has_passed_before_the_first_wait_ends_that_wait() -> None:
    async with asyncio.timeout(60), Runtime() as runtime:
        waiter = await runtime.spawn(Waiter, placement=ChildProcess())
        assert [await waiter.give_up_at_once() for _ in range(3)] == ["timed out"] * 3


async def test_task_and_context_are_the_same_before_and_behind_a_wait() -> None:
    async with asyncio.timeout(60), Runtime() as runtime:
        waiter = await runtime.spawn(Waiter, placement=ChildProcess())
        assert await waiter.same_task_and_context()


async def test_a_cancellation_reaches_what_a_begun_call_waits_for() -> None:
    async with asyncio.timeout(60), Runtime() as runtime:
        waiter = await runtime.spawn(Waiter, placement=ChildProcess())
        assert not await waiter.noted_cancellation()  # from here on it is idle
        call = asyncio.create_task(waiter.wait_for_gate())
        await asyncio.sleep(0)  # it is sent, and the cancellation right behind it
        call.cancel()
        await asyncio.wait([call])
        assert call.cancelled()
        await waiter.give_up_at_once()
        assert await waiter.noted_cancellation()


async def test_calls_behind_one_another_are_answered_one_by_one() -> None:
    async with asyncio.timeout(60), Runtime() as runtime:
        waiter = await runtime.spawn(Waiter, placement=ChildProcess())
        times = await asyncio.gather(*(waiter.hold_up(0.002) for _ in range(20)))
        assert times == sorted(times)


async def test_calls_that_were_begun_leave_before_they_are_awaited() -> None:
    async with asyncio.timeout(60), Runtime() as runtime:
        counters = [
            await runtime.spawn(Counter, start, placement=ChildProcess(), mailbox=1)
            for start in (10, 20)
        ]
        answers = [begin_call(counter, Counter.add, 1) for counter in counters]
        assert [runtime.info(counter).num_pending for counter in counters] == [1, 1]
        # the mailbox is full: it leaves when it is awaited
        late = begin_call(counters[0], Counter.add, 1)
        assert [await answer for answer in answers] == [11, 21]
        assert await late == 12


async def test_an_actor_that_is_not_ready_in_time_is_named_with_its_last_words() -> None:
    async with asyncio.timeout(100), Runtime() as runtime:
        # on a busy machine the process itself may take longer than the limit
        for limit_s in (2.0, 8.0, 32.0):
            with pytest.raises(
                TimeoutError, match=rf"'slow' was not ready within {limit_s} s"
            ) as caught:
                await runtime.spawn(
                    SlowToStart, name="slow", placement=ChildProcess(), start_timeout_s=limit_s
                )
            if "still loading the weights" in str(caught.value):
                return
        pytest.fail(f"its last words are missing: {caught.value}")


async def test_a_cancellation_that_comes_before_the_call_is_awaited_cancels_what_it_waits_for() -> (
    None
):
    gate: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    seen = []

    async def running() -> None:
        try:
            await gate
        except asyncio.CancelledError:
            seen.append("cancelled")

    coroutine = running()
    call = EagerCall(coroutine, coroutine.send(None))
    call.cancellation = asyncio.CancelledError()
    await call
    assert gate.cancelled()
    assert seen == ["cancelled"]


async def test_an_error_of_the_first_part_is_raised_where_the_rest_is_awaited() -> None:
    async def running() -> None:
        raise SystemExit(3)

    coroutine = running()
    with pytest.raises(SystemExit) as first:
        coroutine.send(None)
    with pytest.raises(SystemExit, match="3"):
        await EagerCall(coroutine, error=first.value)
