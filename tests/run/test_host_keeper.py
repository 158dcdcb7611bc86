"""A host that dies is brought up again; one that cannot run the episodes is left alone."""

import asyncio
from typing import Any

import pytest

from vla_rl.cluster import Host, HostResources
from vla_rl.errors import ActorDied, ConfigError
from vla_rl.remote_rollout.host_control import RESTARTS, HostRestarter

HOST = Host(name="far", resources=HostResources(num_cores=1, memory_bytes=1 << 30))
DEATH = ActorDied("host", 7, "killed by SIGKILL")


class Actor:
    """The process of a host; it stays until it dies."""

    def __init__(self) -> None:
        self.death: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def stay(self) -> None:
        await self.death


class Site:
    """A host, and what its keeper does to it; `errors` are raised by the first attempts at it."""

    def __init__(self, *errors: Exception) -> None:
        self.errors, self.actors = list(errors), list[Actor]()
        self.killed, self.num_gone = list[object](), 0
        self.is_up = asyncio.Event()
        bring_up: Any = self._bring_up
        self.keeper = HostRestarter(HOST, bring_up, self._gone, self._kill)

    async def _bring_up(self, host: Host) -> Actor:
        assert host is HOST
        if self.errors:
            raise self.errors.pop(0)
        self.actors.append(Actor())
        self.is_up.set()
        return self.actors[-1]

    async def _kill(self, actor: object) -> None:
        self.killed.append(actor)

    def _gone(self, name: str) -> None:
        assert name == HOST.name
        self.num_gone += 1


async def test_a_host_is_brought_up_again_until_it_has_died_too_often() -> None:
    site = Site()
    await site.keeper.begin()
    async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
        keeping = tasks.create_task(site.keeper.run())
        for _ in range(1 + RESTARTS.max_restarts):
            await site.is_up.wait()
            site.is_up.clear()
            site.actors[-1].death.set_exception(DEATH)
        await keeping
    assert len(site.actors) == 1 + RESTARTS.max_restarts
    assert site.num_gone == len(site.actors) + 1


async def test_a_host_whose_process_dies_at_the_start_is_tried_again() -> None:
    site = Site(DEATH, TimeoutError())
    await site.keeper.begin()
    async with asyncio.timeout(20):
        keeping = asyncio.create_task(site.keeper.run())
        await site.is_up.wait()
        keeping.cancel()
        await asyncio.wait([keeping])
    assert site.killed == site.actors


async def test_a_mistake_ends_the_start_of_a_run_and_later_only_leaves_the_host_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    mistake = ConfigError("no such simulator")
    site = Site(mistake, mistake)
    with pytest.raises(ConfigError, match="no such simulator"):
        await site.keeper.begin()
    async with asyncio.timeout(20):
        await site.keeper.run()
    assert "host far is left alone until it joins again" in caplog.text
    assert (site.actors, site.num_gone, site.killed) == ([], 1, [])


async def test_a_host_that_leaves_loses_its_process() -> None:
    site = Site()
    await site.keeper.begin()
    keeping = asyncio.create_task(site.keeper.run())
    await asyncio.sleep(0)
    keeping.cancel()
    await asyncio.wait([keeping])
    assert (site.killed, site.num_gone) == (site.actors, 1)
