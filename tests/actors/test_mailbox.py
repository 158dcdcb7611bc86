"""The bound on unanswered calls."""

import asyncio

import pytest

from vla_rl.actors.calls.pending import Mailbox


async def test_senders_get_places_in_the_order_of_asking() -> None:
    mailbox, order = Mailbox(1), []
    await mailbox.enter()

    async def send(name: str) -> None:
        await mailbox.enter()
        order.append(name)
        mailbox.leave()

    async with asyncio.timeout(5), asyncio.TaskGroup() as group:
        for name in "abc":
            group.create_task(send(name))
        await asyncio.sleep(0)
        assert mailbox.num_waiting == 3
        mailbox.leave()
    assert order == ["a", "b", "c"]


async def test_a_newcomer_does_not_overtake_those_who_wait() -> None:
    mailbox = Mailbox(1)
    await mailbox.enter()
    waiter = asyncio.create_task(mailbox.enter())
    await asyncio.sleep(0)
    mailbox.leave()
    assert mailbox.try_enter() is False
    await waiter


async def test_a_sender_that_gives_up_passes_its_place_on() -> None:
    mailbox = Mailbox(1)
    await mailbox.enter()
    first, second = asyncio.create_task(mailbox.enter()), asyncio.create_task(mailbox.enter())
    await asyncio.sleep(0)
    mailbox.leave()  # the place goes to the first, which is cancelled before it can take it
    first.cancel()
    async with asyncio.timeout(5):
        await second
    assert first.cancelled()
    assert mailbox.try_enter() is False
    mailbox.leave()
    assert mailbox.try_enter() is True


def test_a_mailbox_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match="mailbox is 0, expected at least 1"):
        Mailbox(0)


async def test_a_sender_that_was_cancelled_and_then_passed_over_is_cancelled_and_nothing_else() -> (
    None
):
    mailbox = Mailbox(1)
    await mailbox.enter()
    waiter = asyncio.create_task(mailbox.enter())
    await asyncio.sleep(0)
    waiter.cancel()
    mailbox.leave()  # finds nobody else who waits
    async with asyncio.timeout(5):
        await asyncio.wait([waiter])
    assert waiter.cancelled()
    assert mailbox.try_enter() is True
