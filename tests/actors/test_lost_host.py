"""A host that is gone, or frozen, fails the calls of its actors within two seconds."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from sample_actors import Counter

from vla_rl.actors import RemoteHost, Runtime, make_keys, read_keys, read_public_key
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
            address=address, server_public_key=read_public_key(keys / "server.pub"), client_keys=client_keys
        )
        yield placement, server
        server.kill()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_lost_host_fails_pending_calls_within_two_seconds(
    host: tuple[RemoteHost, "subprocess.Popen[str]"], how: signal.Signals
) -> None:
    placement, server = host
    async with asyncio.timeout(60), Runtime(name="lost host", stop_grace_s=0.5) as runtime:
        counter = await runtime.spawn(Counter, 3, name="far away", placement=placement)
        pending = asyncio.ensure_future(counter.wait_for_gate("nobody opens it"))
        await counter.cancelled()  # a concurrent endpoint: its answer says that the call before it has arrived
        os.kill(server.pid, how)
        lost_at = time.monotonic()
        with pytest.raises(ActorDied, match="far away"):
            await pending
        # two seconds is the promise; a loaded machine may need one more to run this very test
        assert time.monotonic() - lost_at < 3.0
        with pytest.raises(ActorDied):
            await counter.add(1)
