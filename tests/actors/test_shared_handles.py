"""Handles that are sent to actors: typed, for one holder, across processes and hosts."""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sample_actors import Counter, Holder, Nest, Streamer

from vla_rl.actors import (
    ChildProcess,
    InLoop,
    Placement,
    RemoteHost,
    Runtime,
    close_handle,
    make_keys,
    read_keys,
)
from vla_rl.actors.calls import callers
from vla_rl.actors.host import HostServer
from vla_rl.actors.remote import shared_handles
from vla_rl.errors import ActorDied


@pytest.fixture
async def placements(tmp_path: Path) -> AsyncIterator[dict[str, Placement]]:
    make_keys(tmp_path)
    server, client = read_keys(tmp_path / "server.key"), read_keys(tmp_path / "client.key")
    opened = HostServer("tcp://127.0.0.1:0", server, [client.public], lost_after_s=30.0)
    async with asyncio.timeout(100), opened as host:
        remote = RemoteHost(
            address=host.address,
            server_public_key=server.public,
            client_keys=client,
            lost_after_s=30.0,
        )
        yield {"loop": InLoop(), "child": ChildProcess(), "host": remote}


@pytest.fixture
async def runtime(placements: dict[str, Placement]) -> AsyncIterator[Runtime]:
    async with Runtime(name="owner", stop_grace_s=2.0) as opened:
        yield opened


async def until_cancelled(counter: Counter, who: list[str]) -> None:
    for _ in range(2000):
        if await counter.cancelled() == who:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"{await counter.cancelled()} were cancelled")


def threads_of(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/task"))


async def until_threads(pid: int, num: int) -> None:
    for _ in range(2000):
        if threads_of(pid) <= num:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"{threads_of(pid)} threads, expected {num}")


@pytest.mark.parametrize(
    ("actor_at", "holder_at"),
    [("loop", "loop"), ("loop", "child"), ("child", "loop"), ("host", "child"), ("host", "host")],
)
async def test_a_handle_calls_its_actor_from_wherever_it_is(
    runtime: Runtime, placements: dict[str, Placement], actor_at: str, holder_at: str
) -> None:
    counter = await runtime.spawn(Counter, 5, placement=placements[actor_at])
    streamer = await runtime.spawn(Streamer, placement=placements[actor_at])
    holder = await runtime.spawn(Holder, placement=placements[holder_at])
    assert await holder.class_name(await runtime.share(counter)) == "CounterHandle"
    assert await holder.add_through(await runtime.share(counter), 2) == 7
    both = {name: await runtime.share(counter) for name in ("a", "b")}
    assert await holder.pairs(both) == {"a": 8, "b": 9}
    assert await counter.total() == 9
    size = 3 << 20
    shared = await runtime.share(streamer)
    assert await holder.sum_of_arrays(shared, 40, size) == size * sum(range(40))


async def test_an_owner_and_holders_take_turns(runtime: Runtime) -> None:
    counter = await runtime.spawn(Counter, placement=ChildProcess())
    holders = [await runtime.spawn(Holder, placement=ChildProcess()) for _ in range(2)]
    for holder in holders:
        await holder.keep(await runtime.share(counter))
    callers_ = [*holders, *holders, *holders]
    totals = await asyncio.gather(
        *(holder.slow_add_kept(1) for holder in callers_), *(counter.slow_add(1) for _ in range(3))
    )
    assert sorted(totals) == list(range(1, 10))
    assert await counter.most_running() == 1


async def test_a_holder_may_use_its_handle_beside_its_other_calls_and_gets_errors(
    runtime: Runtime,
) -> None:
    counter = await runtime.spawn(Counter, placement=ChildProcess())
    shared = await runtime.share(counter)
    with pytest.raises(ValueError, match="as it is"):
        await shared.raise_value_error("as it is")
    waiting = asyncio.create_task(shared.wait_concurrently("cancelled"))
    await asyncio.sleep(0)
    assert await shared.total() == 0
    waiting.cancel()
    await until_cancelled(counter, ["cancelled"])
    close_handle(shared)
    with pytest.raises(ActorDied, match="its handle was closed"):
        await shared.total()
    assert await counter.total() == 0


async def test_what_is_no_handle_of_the_declared_class_is_refused(runtime: Runtime) -> None:
    holder = await runtime.spawn(Holder, placement=ChildProcess())
    counter = await runtime.spawn(Counter)
    anything: Any = holder
    for wrong in (5, "Counter", {"target": "sample_actors:Counter"}, np.zeros(3)):
        with pytest.raises(TypeError, match="Counter"):
            await anything.add_through(wrong, 1)
    streamer = await runtime.spawn(Streamer)
    with pytest.raises(TypeError, match="Expected a handle of Counter, got sample_actors:Streamer"):
        await anything.add_through(await runtime.share(streamer), 1)
    with pytest.raises(TypeError, match="got a handle of the actor"):
        await counter.echo_array(await runtime.share(streamer))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"await runtime\.share\(handle\)"):
        await holder.add_through(counter, 1)
    with pytest.raises(ValueError, match="another runtime"):
        await runtime.share(await runtime.share(counter))


async def test_a_class_with_other_methods_is_refused(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder = await runtime.spawn(Holder)
    shared = await runtime.share(await runtime.spawn(Counter))
    reference = shared._client._reference  # type: ignore[attr-defined]
    shared._client._reference = type(reference)(  # type: ignore[attr-defined]
        *(reference.target, "older", *[getattr(reference, name) for name in REST])
    )
    with pytest.raises(TypeError, match="run the same code on both"):
        await holder.add_through(shared, 1)


REST = ("name", "host", "port", "public_key", "keys")


async def test_a_handle_in_use_cannot_be_sent_on_and_an_unused_one_can(runtime: Runtime) -> None:
    first, second = [await runtime.spawn(Holder, placement=ChildProcess()) for _ in range(2)]
    counter = await runtime.spawn(Counter, placement=ChildProcess())
    await first.keep(await runtime.share(counter))
    assert await first.send_on(await runtime.share(second)) == 1
    await first.keep(await runtime.share(counter))
    assert await first.add_kept(1) == 2
    with pytest.raises(TypeError, match="is used here"):
        await first.send_on(await runtime.share(second))


@pytest.mark.parametrize("ends", ["stop", "kill", "drop_of_the_handle"])
async def test_the_end_of_an_actor_or_a_handle_ends_the_calls(runtime: Runtime, ends: str) -> None:
    holder = await runtime.spawn(Holder, placement=ChildProcess())
    counter = await runtime.spawn(Counter, placement=ChildProcess())
    await holder.keep(await runtime.share(counter))
    waiting = asyncio.create_task(holder.wait_kept("it"))
    await asyncio.sleep(0)
    await holder.add_kept(1)  # on the same connection: the call before it has arrived
    if ends == "drop_of_the_handle":
        await holder.close()
    else:
        await (runtime.stop(counter) if ends == "stop" else runtime.kill(counter))
    with pytest.raises(ActorDied):
        await waiting
    with pytest.raises(ActorDied):
        await holder.add_kept(1)
    if ends == "drop_of_the_handle":
        await until_cancelled(counter, ["it"])


async def test_a_holder_that_dies_has_its_calls_cancelled(runtime: Runtime) -> None:
    holder = await runtime.spawn(Holder, placement=ChildProcess())
    counter = await runtime.spawn(Counter, placement=ChildProcess())
    await holder.keep(await runtime.share(counter))
    waiting = asyncio.create_task(holder.wait_kept("of a dead holder"))
    await asyncio.sleep(0)
    await holder.add_kept(1)
    await runtime.kill(holder)
    with pytest.raises(ActorDied):
        await waiting
    await until_cancelled(counter, ["of a dead holder"])


async def test_a_handle_that_is_dropped_leaves_no_thread_on_either_side(runtime: Runtime) -> None:
    holder = await runtime.spawn(Holder, placement=ChildProcess())
    counter = await runtime.spawn(Counter, placement=ChildProcess())
    pids = [runtime.info(each).pid for each in (holder, counter)]
    before = [threads_of(pid) for pid in pids]
    await holder.keep(await runtime.share(counter))
    assert await holder.add_kept(1) == 1
    assert threads_of(pids[1]) > before[1]
    await holder.drop()
    for pid, num in zip(pids, before, strict=True):
        await until_threads(pid, num)
    assert await counter.total() == 1


async def test_a_handle_that_is_not_used_is_void_after_a_minute(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(callers, "_OPENED_WITHIN_S", 0.05)
    monkeypatch.setattr(shared_handles, "LINK_WITHIN_S", 0.5)
    counter = await runtime.spawn(Counter)
    before = threads_of(os.getpid())
    shared = await runtime.share(counter)
    await until_threads(os.getpid(), before)
    with pytest.raises(ActorDied, match="does not answer within"):
        await shared.total()


@pytest.mark.parametrize(("at", "reached_at"), [("child", ""), ("host", "127.0.0.1")])
async def test_a_handle_that_an_actor_returns_can_be_sent_on(
    runtime: Runtime, placements: dict[str, Placement], at: str, reached_at: str
) -> None:
    nest = await runtime.spawn(Nest, placement=placements[at])
    holder = await runtime.spawn(Holder, placement=ChildProcess())
    shared = await nest.shared()
    # on its way here it got the address at which this process reaches that host
    assert shared.__reference__().host == reached_at  # type: ignore[attr-defined]
    assert await holder.add_through(shared, 1) == 101
