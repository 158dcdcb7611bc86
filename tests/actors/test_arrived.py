"""The credit of a stream: its items, and the bytes of those that were not read."""

import asyncio

from sample_actors import Streamer

from vla_rl.actors.calls.actor import get_method_table
from vla_rl.actors.calls.running_calls import InboundCall
from vla_rl.actors.wire.sockets import MOST_BYTES


def a_stream() -> InboundCall:
    return InboundCall(get_method_table(Streamer).by_name["count"], 1, ())


def test_each_item_takes_one_credit() -> None:
    call = a_stream()
    assert not call.has_credit
    call.grant(2)
    call.note_item(0)
    assert call.has_credit
    call.note_item(0)
    assert not call.has_credit


def test_large_items_that_were_not_read_hold_the_next_one_back_whatever_the_credit() -> None:
    call = a_stream()
    call.grant(16)
    call.note_item(MOST_BYTES - 1)
    assert call.has_credit
    call.note_item(1)
    assert not call.has_credit
    call.grant(1)  # the first of them was read
    assert call.has_credit


async def test_a_stream_that_waits_goes_on_with_the_next_credit_that_suffices() -> None:
    call = a_stream()
    call.grant(2)
    call.note_item(MOST_BYTES)
    call.note_item(MOST_BYTES)
    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        waiting = group.create_task(call.until_credit())
        await asyncio.sleep(0)
        call.grant(1)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not waiting.done()
        call.grant(1)
