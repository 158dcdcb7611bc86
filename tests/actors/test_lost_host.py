"""A host that is gone, or frozen, fails the calls of its actors."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from sample_actors import Counter

from vla_rl.actors import KeyPair, RemoteHost, Runtime, make_keys, read_keys, read_public_key
from vla_rl.actors.host_connection import set_tcp_options
from vla_rl.errors import ActorDied


@pytest.fixture
def host(tmp_path: Path, program_environment: dict[str, str]) -> Iterator[tuple[RemoteHost, "subprocess.Popen[str]"]]:
    keys = tmp_path / "keys"
    make_keys(keys)
    command = [sys.executable, "-m", "vla_rl.actors.host", "--bind", "tcp://127.0.0.1:0"]
    command += ["--keys", str(keys / "server.key"), "--allow", str(keys / "client.pub")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=program_environment) as server:
        assert server.stdout is not None
        address = server.stdout.readline().split()[-1]
        client_keys = read_keys(keys / "client.key")
        placement = RemoteHost(
            address=address,
            server_public_key=read_public_key(keys / "server.pub"),
            client_keys=client_keys,
            lost_after_s=4.0,  # of a machine that may hold up any of its processes for a while
        )
        yield placement, server
        server.kill()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_lost_host_fails_pending_calls(
    host: tuple[RemoteHost, "subprocess.Popen[str]"], how: signal.Signals
) -> None:
    placement, server = host
    async with asyncio.timeout(60), Runtime(name="lost host", stop_grace_s=0.5) as runtime:
        counter = await runtime.spawn(Counter, 3, name="far away", placement=placement)
        pending = asyncio.ensure_future(counter.wait_for_gate("nobody opens it"))
        await counter.cancelled()  # a concurrent endpoint: its answer says that the call before it has arrived
        os.kill(server.pid, how)
        with pytest.raises(ActorDied, match="far away"):
            await pending
        with pytest.raises(ActorDied):
            await counter.add(1)


def test_a_silent_host_is_given_up_within_two_seconds_where_nobody_says_otherwise() -> None:
    host = RemoteHost(
        address="tcp://10.0.0.2:7070", server_public_key="", client_keys=KeyPair(public="of ours", secret="of ours")
    )
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        set_tcp_options(socket, host.lost_after_s)
        assert 0 < socket.getsockopt(zmq.HEARTBEAT_IVL) + socket.getsockopt(zmq.HEARTBEAT_TIMEOUT) <= 2000


@pytest.mark.parametrize("lost_after_s", [0.0, 61.0, float("nan")])
def test_a_silence_that_no_connection_can_keep_is_refused(lost_after_s: float) -> None:
    with pytest.raises(ValueError, match=rf"lost_after_s is {lost_after_s}, expected 0.1 to 60 seconds"):
        RemoteHost(
            address="tcp://10.0.0.2:7070",
            server_public_key="",
            client_keys=KeyPair(public="of ours", secret="of ours"),
            lost_after_s=lost_after_s,
        )
