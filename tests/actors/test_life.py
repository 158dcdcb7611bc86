"""The life of an actor: who waits for the next incarnation, and which error the others get."""

import asyncio

import pytest

from vla_rl.actors.calls.pending import ActorLifecycle, ActorState
from vla_rl.errors import ActorDied, ActorFrozen


def frozen() -> ActorFrozen:
    return ActorFrozen("env-1", 7, "step did not answer within 2 s", ("last words",))


async def test_callers_wait_while_an_actor_restarts_and_go_on_with_the_next_incarnation() -> None:
    life = ActorLifecycle("env-1")
    life.settle(ActorState.RUNNING, None)
    await life.until_running()
    life.settle(ActorState.RESTARTING, frozen())
    waiting = asyncio.create_task(life.until_running())
    await asyncio.sleep(0)
    assert not waiting.done()
    life.settle(ActorState.RUNNING, None)
    async with asyncio.timeout(5):
        await waiting


async def test_callers_that_wait_get_the_error_if_no_incarnation_comes() -> None:
    life = ActorLifecycle("env-1")
    life.settle(ActorState.RESTARTING, frozen())
    waiting = asyncio.create_task(life.until_running())
    await asyncio.sleep(0)
    life.settle(ActorState.DEAD, frozen())
    async with asyncio.timeout(5):
        with pytest.raises(ActorFrozen, match="did not answer within 2 s"):
            await waiting


async def test_each_caller_gets_an_error_of_its_own_with_pid_and_last_words() -> None:
    life = ActorLifecycle("env-1")
    life.settle(ActorState.DEAD, frozen())
    first, second = life.death(), life.death()
    assert first is not second
    assert (type(first), first.pid, first.last_words) == (ActorFrozen, 7, ("last words",))


async def test_an_actor_that_never_ran_is_reported_with_its_state() -> None:
    with pytest.raises(ActorDied, match="it is starting"):
        await ActorLifecycle("env-1").until_running()


async def test_the_last_error_says_why_no_incarnation_follows() -> None:
    life = ActorLifecycle("env-1")
    life.settle(ActorState.DEAD, frozen())
    assert life.last_error("too often", None).cause.endswith("within 2 s; too often")
    failed = life.last_error("too often", ValueError("no room"))
    assert failed.cause.endswith("; too often; the last restart failed: no room")
    assert isinstance(failed, ActorFrozen)
