"""Tasks on the event loop: who owns them, how they end, what a loop that is held up reports."""

import asyncio
import gc
import threading
import time

import pytest

from vla_rl.util.stalls import (
    Wait,
    add_wait_source,
    begin_wait,
    count_progress,
    end_wait,
    format_thread_stack,
    list_awaiting_frames,
    list_tasks,
    list_waits,
    note_progress,
    remove_wait_source,
    waiting,
)
from vla_rl.util.tasks import (
    await_end,
    finish_despite_cancellation,
    gather_all,
    is_being_cancelled,
    leave_group,
    run_in_simulated_time,
    run_in_thread,
)


async def test_the_result_of_work_is_that_of_awaiting_it() -> None:
    async def work() -> int:
        return 3

    assert await await_end(asyncio.ensure_future(work())) == 3
    assert await finish_despite_cancellation(work()) == (3, False)
    assert await run_in_thread(divmod, 7, 2) == (3, 1)


async def test_a_cancelled_caller_leaves_only_after_the_work_is_done() -> None:
    may_end = asyncio.Event()
    work = asyncio.ensure_future(may_end.wait())
    caller = asyncio.ensure_future(await_end(work))
    async with asyncio.timeout(5):
        for _ in range(2):  # the second cancellation does not shorten the wait either
            await asyncio.sleep(0)
            caller.cancel()
        await asyncio.sleep(0)
        assert not caller.done()
        may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await caller
    assert work.result()


async def test_a_cancelled_caller_waits_for_the_thread() -> None:
    started, may_end = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()
    ended = []

    def work() -> None:
        loop.call_soon_threadsafe(started.set)
        may_end.wait(5)
        ended.append(True)

    caller = asyncio.ensure_future(run_in_thread(work))
    async with asyncio.timeout(5):
        await started.wait()
        caller.cancel()
        await asyncio.sleep(0)
        assert not caller.done()
        may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await caller
    assert ended == [True]


async def test_a_caller_that_finishes_is_told_that_it_was_cancelled() -> None:
    may_end = asyncio.Event()
    caller = asyncio.ensure_future(finish_despite_cancellation(may_end.wait()))
    async with asyncio.timeout(5):
        await asyncio.sleep(0)
        caller.cancel()
        await asyncio.sleep(0)
        may_end.set()
        assert await caller == (True, True)


async def test_an_error_of_the_work_is_raised_to_its_caller() -> None:
    async def work() -> None:
        raise OSError("full")

    with pytest.raises(OSError, match="full"):
        await await_end(asyncio.ensure_future(work()))
    with pytest.raises(OSError, match="full"):
        await finish_despite_cancellation(work())


async def test_an_error_of_work_whose_caller_was_cancelled_is_not_reported_as_forgotten() -> None:
    may_end = asyncio.Event()
    forgotten: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, told: forgotten.append(told))

    async def work() -> None:
        await may_end.wait()
        raise OSError("full")

    caller = asyncio.ensure_future(await_end(asyncio.ensure_future(work())))
    async with asyncio.timeout(5):
        await asyncio.sleep(0)
        caller.cancel()
        await asyncio.sleep(0)
        may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await caller
    del caller
    await asyncio.sleep(0)  # the loop lets go of it too
    gc.collect()  # asyncio reports an error that nobody read when its task is collected
    assert not forgotten


async def test_an_error_of_one_call_is_raised_once_all_have_ended() -> None:
    ended: list[int] = []

    async def call(number: int) -> int:
        if number == 1:
            raise ValueError("one failed")
        await asyncio.sleep(0.01 * number)
        ended.append(number)
        return number

    with pytest.raises(ValueError, match="one failed"):
        await gather_all(call(number) for number in range(3))
    assert ended == [0, 2]
    assert await gather_all(call(number) for number in (2, 0)) == [2, 0]


async def opened(*errors: Exception) -> asyncio.TaskGroup:
    async def fail(error: Exception) -> None:
        raise error

    tasks = asyncio.TaskGroup()
    await tasks.__aenter__()
    for error in errors:
        tasks.create_task(fail(error))
    return tasks


async def test_a_single_error_is_raised_as_itself() -> None:
    error = ValueError("alone")
    with pytest.raises(ValueError, match="alone") as raised:
        await leave_group(await opened(error), None, None, None)
    assert raised.value is error


async def test_several_errors_are_raised_together() -> None:
    with pytest.raises(ExceptionGroup) as raised:
        await leave_group(await opened(ValueError("one"), KeyError("two")), None, None, None)
    assert len(raised.value.exceptions) == 2


async def test_the_owners_own_error_is_left_to_the_owner() -> None:
    error = ValueError("of the block")
    await leave_group(await opened(), ValueError, error, None)


async def test_a_task_knows_whether_it_was_asked_to_end() -> None:
    found: list[bool] = []

    async def wait() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            found.append(is_being_cancelled())

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    stranger = asyncio.get_running_loop().create_future()
    stranger.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stranger
    assert [*found, is_being_cancelled()] == [True, False]


def test_an_hour_of_waiting_passes_at_once_and_in_order() -> None:
    woken: list[tuple[str, float]] = []

    async def sleep(name: str, seconds: float) -> None:
        await asyncio.sleep(seconds)
        woken.append((name, asyncio.get_running_loop().time()))

    async def main() -> float:
        async with asyncio.TaskGroup() as group:
            group.create_task(sleep("late", 3600.0))
            group.create_task(sleep("early", 60.0))
        return asyncio.get_running_loop().time()

    before = time.monotonic()
    assert run_in_simulated_time(main()) == 3600.0
    assert woken == [("early", 60.0), ("late", 3600.0)]
    assert time.monotonic() - before < 60.0


def test_a_deadline_is_met_on_the_simulated_clock() -> None:
    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5.0):
                await asyncio.sleep(10.0)
        return asyncio.get_running_loop().time()

    assert run_in_simulated_time(main()) == 5.0


def test_tasks_that_wait_for_each_other_end_in_an_error() -> None:
    async def main() -> None:
        await asyncio.sleep(2.5)
        await asyncio.Event().wait()

    with pytest.raises(RuntimeError, match=r"at 2\.500 s of simulated time every task waits"):
        run_in_simulated_time(main())


def listed(*who: str) -> list[str]:
    return [wait.who for wait in list_waits() if wait.who in who]


def test_a_wait_is_listed_until_its_block_is_left_in_any_way() -> None:
    def wait_and_fail() -> None:
        with waiting("episode 12", on="env-3"):
            (wait,) = [each for each in list_waits() if each.who == "episode 12"]
            raise RuntimeError(wait.on)

    with pytest.raises(RuntimeError, match="env-3"):
        wait_and_fail()
    assert listed("episode 12") == []


def test_a_wait_that_is_no_block_ends_with_its_token_and_only_once() -> None:
    token = begin_wait("a", on="b")
    assert listed("a") == ["a"]
    end_wait(token)
    end_wait(token)
    assert listed("a") == []


def test_waits_of_a_source_are_listed_too_the_longest_first() -> None:
    source = add_wait_source(lambda: [Wait("late", "x", 2.0), Wait("early", "x", 1.0)])
    try:
        assert listed("early", "late") == ["early", "late"]
    finally:
        remove_wait_source(source)
    assert listed("early", "late") == []


def test_a_wait_is_described_in_one_line() -> None:
    assert Wait("episode 12", "env-3", 10.0).describe(14.2) == (
        "episode 12 waits for env-3 since 4.2 s"
    )


def test_progress_is_counted_by_its_name() -> None:
    before = count_progress().get("tests of waits", 0)
    note_progress("tests of waits")
    note_progress("tests of waits", 3)
    assert count_progress()["tests of waits"] == before + 4


async def inner(event: asyncio.Event) -> None:
    await event.wait()


async def outer(event: asyncio.Event) -> None:
    await inner(event)


async def test_frames_go_from_the_outermost_coroutine_to_the_suspended_one() -> None:
    event = asyncio.Event()
    async with asyncio.timeout(5), asyncio.TaskGroup() as group:
        task = group.create_task(outer(event))
        await asyncio.sleep(0)
        names = [frame.f_code.co_name for frame in list_awaiting_frames(task.get_coro())]
        event.set()
    assert names == ["outer", "inner", "wait"]


async def test_tasks_are_listed_by_name() -> None:
    event = asyncio.Event()
    async with asyncio.timeout(5), asyncio.TaskGroup() as group:
        for name in ("waits b", "waits a"):
            group.create_task(inner(event), name=name)
        listed = [task.get_name() for task in list_tasks(asyncio.get_running_loop())]
        event.set()
    assert listed == sorted(listed)
    assert {"waits a", "waits b"} <= set(listed)


def test_the_stack_of_a_thread_ends_where_it_is() -> None:
    started, may_end = threading.Event(), threading.Event()

    def block() -> None:
        started.set()
        may_end.wait(5)

    thread = threading.Thread(target=block)
    thread.start()
    assert started.wait(5)
    assert thread.ident is not None
    stack = format_thread_stack(thread.ident)
    may_end.set()
    thread.join()
    assert "in block" in stack
    assert "it has ended" in format_thread_stack(thread.ident)
