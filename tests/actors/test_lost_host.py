"""A host that is lost fails its calls; a process whose client is lost waits for the next one."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import zmq
from sample_actors import Counter, CrashLoop

from vla_rl.actors import (
    ChildProcess,
    ForkServer,
    KeyPair,
    RemoteHost,
    Runtime,
    Takeover,
    make_keys,
    read_keys,
    read_public_key,
)
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


CLIENT_WITH_TAKEOVER = """
import asyncio, sys
from pathlib import Path
from sample_actors import Counter
from vla_rl.actors import RemoteHost, Runtime, Takeover, read_keys, read_public_key

async def main(address, keys, within_s):
    there = RemoteHost(
        address=address,
        server_public_key=read_public_key(keys / "server.pub"),
        client_keys=read_keys(keys / "client.key"),
        takeover=Takeover(owner="run 1", name="counter", within_s=float(within_s)),
    )
    async with Runtime() as runtime:
        counter = await runtime.spawn(Counter, placement=there)
        await counter.add(41)
        waiting = asyncio.ensure_future(counter.wait_for_gate("nobody opens it"))
        await counter.cancelled()
        print(runtime.info(counter).pid, flush=True)
        await waiting

asyncio.run(main(sys.argv[1], Path(sys.argv[2]), sys.argv[3]))
"""


class Site:
    """A host in this process, and clients of it in others."""

    def __init__(self, server: HostServer, keys: Path, environment: dict[str, str]) -> None:
        self.server, self._keys, self._environment = server, keys, environment

    def make_placement(
        self, owner: str = "run 1", name: str = "counter", within_s: float = 60
    ) -> RemoteHost:
        return RemoteHost(
            address=self.server.address,
            server_public_key=read_public_key(self._keys / "server.pub"),
            client_keys=read_keys(self._keys / "client.key"),
            takeover=Takeover(owner=owner, name=name, within_s=within_s),
        )

    @asynccontextmanager
    async def killed_client(self, within_s: float = 60.0) -> AsyncIterator[int]:
        """Kill a client whose counter stands at 41 and waits; yield the pid of its process here."""
        program = await asyncio.create_subprocess_exec(
            *(
                sys.executable,
                "-c",
                CLIENT_WITH_TAKEOVER,
                self.server.address,
                str(self._keys),
                str(within_s),
            ),
            stdout=subprocess.PIPE,
            env=self._environment,
        )
        try:
            assert program.stdout is not None
            pid = int(await program.stdout.readline())
        finally:
            program.kill()
            await program.wait()
        yield pid


@pytest.fixture
async def site(tmp_path: Path, program_environment: dict[str, str]) -> AsyncIterator[Site]:
    keys = tmp_path / "keys"
    make_keys(keys)
    server, client = read_keys(keys / "server.key"), read_keys(keys / "client.key")
    opened = HostServer("tcp://127.0.0.1:0", server, [client.public], lost_after_s=20.0)
    async with asyncio.timeout(60), opened as host:
        yield Site(host, keys, program_environment)


def has_process(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


async def until_gone(pid: int) -> None:
    while has_process(pid):  # noqa: ASYNC110 - a process that is no child has no event
        await asyncio.sleep(0.01)


async def test_the_next_client_takes_over_the_actor_with_its_state(site: Site) -> None:
    async with site.killed_client() as pid, Runtime() as runtime:
        counter = await runtime.spawn(Counter, placement=site.make_placement())
        assert runtime.info(counter).pid == pid
        # the mailbox is free again: the call that waited was cancelled with its client
        assert await counter.cancelled() == ["nobody opens it"]
        assert await counter.add(1) == 42
        assert (site.server.num_actors, site.server.num_waiting_processes) == (1, 0)
    # left in order, so it does not wait again
    await until_gone(pid)
    assert site.server.num_waiting_processes == 0


async def test_a_process_that_nobody_takes_over_ends(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    async with site.killed_client(within_s=0.2) as pid:
        await until_gone(pid)
    assert "no client took over counter of run 1 within 0.2 s; it is killed" in caplog.text


async def test_another_owner_finds_nothing_and_ends_what_waits(site: Site) -> None:
    async with site.killed_client() as pid, Runtime() as runtime:
        while not site.server.num_waiting_processes:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        counter = await runtime.spawn(Counter, placement=site.make_placement(owner="run 2"))
        assert runtime.info(counter).pid != pid
        assert await counter.add(1) == 1
        await until_gone(pid)


async def test_a_host_that_ends_takes_along_what_waits_there(site: Site) -> None:
    async with site.killed_client() as pid:
        while not site.server.num_waiting_processes:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await site.server._waiting.close()
        await until_gone(pid)


async def test_the_newest_client_of_an_owner_wins(site: Site) -> None:
    async with Runtime("first") as first, Runtime("second") as second:
        before = await first.spawn(Counter, placement=site.make_placement())
        await before.add(5)
        after = await second.spawn(Counter, placement=site.make_placement())
        assert await after.add(1) == 6
        with pytest.raises(ActorDied, match="another process of run 1 took it over"):
            await before.add(1)


async def test_a_process_with_another_actor_is_not_taken_over(site: Site) -> None:
    async with site.killed_client(), Runtime() as runtime:
        with pytest.raises(TypeError, match=r"holds sample_actors:Counter, expected .*CrashLoop"):
            await runtime.spawn(CrashLoop, placement=site.make_placement())


async def test_a_process_that_dies_while_it_waits_is_started_anew(site: Site) -> None:
    async with site.killed_client() as pid, Runtime() as runtime:
        while not site.server.num_waiting_processes:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        os.kill(pid, signal.SIGKILL)
        while site.server.num_waiting_processes:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        counter = await runtime.spawn(Counter, placement=site.make_placement())
        assert await counter.add(1) == 1


def test_what_cannot_wait_is_refused() -> None:
    with pytest.raises(ValueError, match=r"within_s is 0, expected > 0 seconds"):
        Takeover(owner="run", name="host", within_s=0)
    with pytest.raises(ValueError, match="a forked process cannot be taken over"):
        RemoteHost(
            address="tcp://10.0.0.2:7070",
            server_public_key="",
            client_keys=KeyPair(public="of ours", secret="of ours"),
            process=ChildProcess(fork_from=ForkServer()),
            takeover=Takeover(owner="run", name="host", within_s=1),
        )
