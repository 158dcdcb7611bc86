"""An owner's tasks raise their one error as itself, and know whether they are asked to end."""

import asyncio

import pytest

from vla_rl.util.task_groups import is_being_cancelled, leave


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
        await leave(await opened(error), None, None, None)
    assert raised.value is error


async def test_several_errors_are_raised_together() -> None:
    with pytest.raises(ExceptionGroup) as raised:
        await leave(await opened(ValueError("one"), KeyError("two")), None, None, None)
    assert len(raised.value.exceptions) == 2


async def test_the_owners_own_error_is_left_to_the_owner() -> None:
    error = ValueError("of the block")
    await leave(await opened(), ValueError, error, None)


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
