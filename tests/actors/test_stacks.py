"""Stacks of tasks and threads show where each waits."""

import asyncio
import threading

from vla_rl.actors.stacks import awaiting_frames, tasks_of, thread_stack


async def inner(event: asyncio.Event) -> None:
    await event.wait()


async def outer(event: asyncio.Event) -> None:
    await inner(event)


async def test_frames_go_from_the_outermost_coroutine_to_the_suspended_one() -> None:
    event = asyncio.Event()
    async with asyncio.timeout(5), asyncio.TaskGroup() as group:
        task = group.create_task(outer(event))
        await asyncio.sleep(0)
        names = [frame.f_code.co_name for frame in awaiting_frames(task.get_coro())]
        event.set()
    assert names == ["outer", "inner", "wait"]


async def test_tasks_are_listed_by_name() -> None:
    event = asyncio.Event()
    async with asyncio.timeout(5), asyncio.TaskGroup() as group:
        for name in ("waits b", "waits a"):
            group.create_task(inner(event), name=name)
        listed = [task.get_name() for task in tasks_of(asyncio.get_running_loop())]
        event.set()
    assert listed == sorted(listed)
    assert {"waits a", "waits b"} <= set(listed)


def test_the_stack_of_a_thread_ends_where_it_is() -> None:
    begun, may_end = threading.Event(), threading.Event()

    def waits_here() -> None:
        begun.set()
        may_end.wait(5)

    thread = threading.Thread(target=waits_here)
    thread.start()
    assert begun.wait(5)
    assert thread.ident is not None
    stack = thread_stack(thread.ident)
    may_end.set()
    thread.join()
    assert "waits_here" in stack
    assert "it has ended" in thread_stack(thread.ident)
