"""Being asked to stop: the work is cancelled and cleans up, what must not be cut in half is carried through."""

import asyncio
import os
import signal

import pytest

from vla_rl.recipes.stopping import StopSignal, carried_through


async def test_work_that_ends_by_itself_is_just_awaited() -> None:
    done: list[str] = []

    async def work() -> None:
        done.append("worked")

    with StopSignal() as stop:
        await stop.unless_asked(work())
    assert done == ["worked"]
    assert not stop.is_asked


async def test_asked_to_stop_the_work_is_cancelled_and_its_clean_up_awaited() -> None:
    story: list[str] = []

    async def work(stop: StopSignal) -> None:
        try:
            stop.ask()
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            story.append("cleaned up")

    async with asyncio.timeout(5):
        with StopSignal() as stop:
            await stop.unless_asked(work(stop))
    assert story == ["cleaned up"]


async def test_a_signal_is_answered_with_what_stopping_does(capsys: pytest.CaptureFixture[str]) -> None:
    for then in ("saving a checkpoint", "losing the episodes being played"):
        async with asyncio.timeout(5):
            with StopSignal(then) as stop:
                os.kill(os.getpid(), signal.SIGINT)
                await stop.unless_asked(asyncio.Event().wait())  # type: ignore[arg-type]
        assert capsys.readouterr().err == f"SIGINT: stopping in order and {then}; once more stops at once\n"


async def test_an_error_of_the_work_is_raised_as_it_is() -> None:
    async def work() -> None:
        raise RuntimeError("broken")

    with StopSignal() as stop, pytest.raises(RuntimeError, match="broken"):
        await stop.unless_asked(work())


async def test_what_is_carried_through_ends_before_its_caller_is_cancelled() -> None:
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def update() -> int:
        begun.set()
        await go_on.wait()
        return 7

    async with asyncio.timeout(5):
        caller = asyncio.create_task(carried_through(update()))
        await begun.wait()
        caller.cancel()
        await asyncio.sleep(0)
        assert not caller.done()
        go_on.set()
        assert await caller == (7, True)


async def test_an_error_of_what_is_carried_through_reaches_the_caller() -> None:
    async def update() -> int:
        raise FloatingPointError("not finite")

    with pytest.raises(FloatingPointError, match="not finite"):
        await carried_through(update())
