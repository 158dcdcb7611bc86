"""How the channels of a runtime's actors are opened, and what they share."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from sample_actors import Counter

from vla_rl.actors import InLoop, RemoteHost, make_keys, read_keys, read_public_key
from vla_rl.actors.calls.actor import get_method_table
from vla_rl.actors.processes.channels import ActorExit, Channel
from vla_rl.actors.supervision import Launchers
from vla_rl.util.stalls import LoopLag


@asynccontextmanager
async def open_launchers() -> AsyncIterator[Launchers]:
    lag = LoopLag()
    launchers = Launchers("test", lag)
    yield launchers
    await launchers.close_fork_servers()
    launchers.close()
    lag.stop()


@pytest_asyncio.fixture
async def launchers() -> AsyncIterator[Launchers]:
    async with open_launchers() as launchers:
        yield launchers


def launched(launchers: Launchers, placement: Any) -> tuple[Channel, "asyncio.Future[ActorExit]"]:
    """Open a channel to a counter, and give it with its death to come."""
    death: asyncio.Future[ActorExit] = asyncio.get_running_loop().create_future()
    launch = launchers.launcher("counter", get_method_table(Counter), (3,), placement, mailbox=4)
    return launch(lambda frames: None, death.set_result), death


@pytest.fixture
def nowhere(tmp_path: Path) -> RemoteHost:
    """A host that does not answer."""
    make_keys(tmp_path)
    return RemoteHost(
        address="tcp://127.0.0.1:1",
        server_public_key=read_public_key(tmp_path / "server.pub"),
        client_keys=read_keys(tmp_path / "client.key"),
    )


async def test_an_actor_of_this_loop_has_no_process_and_each_incarnation_a_channel_of_its_own(
    launchers: Launchers,
) -> None:
    (first, death), (second, other) = (launched(launchers, InLoop()) for _ in range(2))
    assert first.pid == second.pid == 0
    first.kill()
    async with asyncio.timeout(10):
        assert (await death).cause == "killed"
        assert not other.done()
        second.kill()
        await other


async def test_actors_of_one_host_share_a_connection_until_its_settings_differ(
    launchers: Launchers, nowhere: RemoteHost
) -> None:
    patient = RemoteHost(
        address=nowhere.address,
        server_public_key=nowhere.server_public_key,
        client_keys=nowhere.client_keys,
        lost_after_s=30.0,
    )
    channels = [launched(launchers, host)[0] for host in (nowhere, nowhere, patient)]
    # a connection numbers its actors
    assert [channel.actor_id for channel in channels] == [1, 2, 1]


async def test_closing_the_connections_ends_the_actors_behind_them(
    nowhere: RemoteHost,
) -> None:
    async with open_launchers() as launchers:
        _, death = launched(launchers, nowhere)
    async with asyncio.timeout(10):
        assert (await death).cause == "connection to tcp://127.0.0.1:1 was closed"


async def test_a_placement_of_another_kind_is_refused_before_anything_starts(
    launchers: Launchers,
) -> None:
    with pytest.raises(TypeError, match="'here', expected InLoop, ChildProcess or RemoteHost"):
        launched(launchers, "here")
