"""Who waits for what is listed, with the stacks of tasks."""

import asyncio
import threading

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
