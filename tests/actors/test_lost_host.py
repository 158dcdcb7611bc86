"""A host that is gone, or frozen, fails the calls of its actors, and a client that is frozen loses
its actors there.
"""

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
from vla_rl.actors.host import HostServer
from vla_rl.actors.remote.direct_link import set_tcp_options
from vla_rl.errors import ActorDied


@pytest.fixture
def host(
    tmp_path: Path, program_environment: dict[str, str]
) -> Iterator[tuple[RemoteHost, "subprocess.Popen[str]"]]:
    keys = tmp_path / "keys"
    make_keys(keys)
    command = [sys.executable, "-m", "vla_rl.actors.host", "--bind", "tcp://127.0.0.1:0"]
    command += [
        "--keys",
        str(keys / "server.key"),
        "--allow",
        str(keys / "client.pub"),
        "--lost-after",
        "30",
    ]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=program_environment
    ) as server:
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
        # a concurrent method: its answer says that the call before it has arrived
        await counter.cancelled()
        os.kill(server.pid, how)
        with pytest.raises(ActorDied, match="far away"):
            await pending
        with pytest.raises(ActorDied):
            await counter.add(1)


CLIENT = """
import asyncio, sys
from pathlib import Path
from sample_actors import Counter
from vla_rl.actors import RemoteHost, Runtime, read_keys, read_public_key

async def main(address, keys):
    there = RemoteHost(
        address=address,
        server_public_key=read_public_key(keys / "server.pub"),
        client_keys=read_keys(keys / "client.key"),
        lost_after_s=60.0,
    )
    async with Runtime() as runtime:
        await runtime.spawn(Counter, placement=there)
        print("spawned", flush=True)
        await asyncio.Event().wait()

asyncio.run(main(sys.argv[1], Path(sys.argv[2])))
"""


async def test_a_host_kills_the_actors_of_a_client_that_is_silent(
    tmp_path: Path, program_environment: dict[str, str]
) -> None:
    keys = tmp_path / "keys"
    make_keys(keys)
    server, client = read_keys(keys / "server.key"), read_keys(keys / "client.key")
    opened = HostServer("tcp://127.0.0.1:0", server, [client.public], lost_after_s=4.0)
    async with asyncio.timeout(50), opened as host:
        program = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            CLIENT,
            host.address,
            str(keys),
            stdout=subprocess.PIPE,
            env=program_environment,
        )
        try:
            assert program.stdout is not None
            assert await program.stdout.readline() == b"spawned\n"
            assert host.num_actors == 1
            program.send_signal(signal.SIGSTOP)
            while host.num_actors:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        finally:
            program.kill()
            await program.wait()


def test_a_silent_host_is_given_up_within_two_seconds_where_nobody_says_otherwise() -> None:
    host = RemoteHost(
        address="tcp://10.0.0.2:7070",
        server_public_key="",
        client_keys=KeyPair(public="of ours", secret="of ours"),
    )
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        set_tcp_options(socket, host.lost_after_s)
        assert (
            0
            < socket.getsockopt(zmq.HEARTBEAT_IVL) + socket.getsockopt(zmq.HEARTBEAT_TIMEOUT)
            <= 2000
        )


@pytest.mark.parametrize("lost_after_s", [0.0, 3601.0, float("nan")])
def test_a_silence_that_no_connection_can_keep_is_refused(lost_after_s: float) -> None:
    with pytest.raises(
        ValueError, match=rf"lost_after_s is {lost_after_s}, expected 0.1 to 3600 seconds"
    ):
        RemoteHost(
            address="tcp://10.0.0.2:7070",
            server_public_key="",
            client_keys=KeyPair(public="of ours", secret="of ours"),
            lost_after_s=lost_after_s,
        )


def test_the_server_refuses_a_silence_that_it_cannot_keep_in_one_line(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys")
    command = [
        sys.executable,
        "-m",
        "vla_rl.actors.host",
        "--keys",
        str(tmp_path / "keys/server.key"),
    ]
    command += ["--allow", str(tmp_path / "keys/client.pub"), "--lost-after", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (
        1,
        "lost_after_s is 0.0, expected 0.1 to 3600 seconds.\n",
    )
