"""An actor on another host talks to its client alone, over a connection that its host never sees."""

import asyncio
import contextlib
import errno
import os
import socket
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zmq
from hooks import Heir
from sample_actors import Counter, Streamer

from vla_rl.actors import (
    ChildProcess,
    ForkServer,
    PrepareHook,
    RemoteHost,
    Runtime,
    make_keys,
    read_keys,
)
from vla_rl.actors.host import HostServer
from vla_rl.actors.remote import direct_link as listening_module, host_connection
from vla_rl.actors.remote.direct_link import DirectLink, explain_open_ports, make_link_keys
from vla_rl.actors.remote.peer_sockets import ServerSocket, open_link
from vla_rl.actors.wire.codec import Codec
from vla_rl.actors.wire.envelope import Frames, Kind
from vla_rl.actors.wire.sockets import MOST_BYTES
from vla_rl.errors import ActorDied, ConfigError

LOST_AFTER_S = 30.0


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("direct") / "keys"
    make_keys(folder)
    return folder


@contextlib.asynccontextmanager
async def serving(keys: Path, **options: object) -> AsyncIterator[HostServer]:
    server, client = read_keys(keys / "server.key"), read_keys(keys / "client.key")
    async with HostServer(
        "tcp://127.0.0.1:0",
        server,
        [client.public],
        lost_after_s=LOST_AFTER_S,
        **options,  # type: ignore[arg-type]
    ) as opened:
        yield opened


@pytest.fixture
async def host(keys: Path) -> AsyncIterator[HostServer]:
    async with asyncio.timeout(100), serving(keys) as opened:
        yield opened


@pytest.fixture
async def runtime() -> AsyncIterator[Runtime]:
    async with asyncio.timeout(100), Runtime(name="client", stop_grace_s=5.0) as opened:
        yield opened


def there(host: HostServer, keys: Path, **process: object) -> RemoteHost:
    return RemoteHost(
        address=host.address,
        server_public_key=read_keys(keys / "server.key").public,
        client_keys=read_keys(keys / "client.key"),
        process=ChildProcess(**process),  # type: ignore[arg-type]
        lost_after_s=LOST_AFTER_S,
    )


def listening_ports(pid: int) -> list[int]:
    """Ports at which a process listens."""
    sockets = {
        os.readlink(link).removeprefix("socket:[").rstrip("]")
        for link in Path(f"/proc/{pid}/fd").iterdir()
        if os.readlink(link).startswith("socket:[")
    }
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    listening = "0A"
    return [
        int(row[1].partition(":")[2], 16)
        for row in rows
        if row[3] == listening and row[9] in sockets
    ]


def cut_connection(port: int) -> None:
    """End the connection of this process to a port, as a firewall does."""
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(link.name))) as ours:
            if ours.family == socket.AF_INET and ours.getpeername()[1] == port:
                ours.shutdown(socket.SHUT_RDWR)


async def test_arrays_of_any_size_pass_by_the_host(
    host: HostServer, keys: Path, runtime: Runtime
) -> None:
    counter = await runtime.spawn(Counter, placement=there(host, keys))
    received = []
    host._socket.on_message = received.append
    for num_bytes in (5_000, 1 << 18, 3_000_000):
        values = np.random.default_rng(0).integers(0, 255, num_bytes, np.uint8)
        answer = await counter.echo_array(values)
        assert np.array_equal(answer, values)
        assert not answer.flags.writeable
    assert received == []


async def test_a_consumer_of_large_items_that_does_not_read_pauses_the_stream(
    host: HostServer, keys: Path, runtime: Runtime
) -> None:
    streamer = await runtime.spawn(Streamer, placement=there(host, keys))
    num_bytes = MOST_BYTES // 4
    stream = streamer.images(12, num_bytes)
    assert (await anext(stream)).size == num_bytes
    previous = -1
    while (made := await streamer.made()) != previous:
        previous = made
    assert made <= 6  # four that nobody has read, one that was, and one that waits
    assert [int(image[-1]) async for image in stream] == list(range(1, 12))


async def test_no_one_else_reaches_an_actor_once_its_client_has(
    host: HostServer, keys: Path, runtime: Runtime
) -> None:
    if why := explain_open_ports():
        pytest.skip(f"this kernel refuses filters on sockets to this user: {why}")
    counter = await runtime.spawn(Counter, placement=there(host, keys))
    (port,) = listening_ports(await counter.pid())
    with pytest.raises(TimeoutError):
        socket.create_connection(("127.0.0.1", port), timeout=0.5)
    assert await counter.add(1) == 1


def refuse_filters(listening: socket.socket) -> None:
    """Answer as a kernel that leaves filters on sockets to root."""
    raise PermissionError(errno.EPERM, "Operation not permitted")


async def test_a_kernel_that_refuses_filters_is_named_once_and_actors_run(
    keys: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(listening_module, "_drop_all_packets", refuse_filters)
    received: list[Frames] = []
    socket = ServerSocket((client := make_link_keys()).public, received.append)
    with contextlib.closing(socket):
        async with asyncio.timeout(60), serving(keys):
            (line,) = [each.getMessage() for each in caplog.records]
            assert line.startswith(
                "this kernel refuses filters on sockets to this user (Operation not permitted)"
            )
        with open_link("127.0.0.1", socket.address, client, received.append, lambda: None) as link:
            link.send_frames(Codec().encode(Kind.CALL, 0, 0, 1, "in", "test"))
            async with asyncio.timeout(30):
                while not received:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            stranger: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
            other = DirectLink(
                stranger,
                f"tcp://127.0.0.1:{socket.address.port}",
                socket.address.public_key,
                make_link_keys(),
                received.append,
                (lost := asyncio.Event()).set,
            )
            other.send_frames(Codec().encode(Kind.CALL, 0, 0, 1, "out", "test"))
            async with asyncio.timeout(30):
                await lost.wait()  # refused: the port is open, and the key is unknown
            other.close()
            stranger.term()
    assert len(received) == 1


async def test_a_listed_key_is_not_enough_for_the_actor_of_another_client(
    host: HostServer, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    intruder = context.socket(zmq.PAIR)
    monitor = intruder.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
    client = read_keys(keys / "client.key")

    class Late(host_connection.DirectLink):
        """Comes after the intruder."""

        def __init__(self, context: object, address: str, public_key: str, *rest: object) -> None:
            intruder.curve_serverkey = public_key.encode()
            intruder.curve_publickey = client.public.encode()
            intruder.curve_secretkey = client.secret.encode()
            intruder.connect(address)
            intruder.send(Codec().encode(Kind.STOP, 0, 0, 0, None, "stop")[0])
            assert monitor.poll(20_000)
            super().__init__(context, address, public_key, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(host_connection, "DirectLink", Late)
    async with asyncio.timeout(60), Runtime() as runtime:
        counter = await runtime.spawn(Counter, placement=there(host, keys))
        assert await counter.add(1) == 1
    monitor.close()
    context.destroy(linger=0)


async def test_an_actor_whose_port_cannot_be_reached_is_refused_with_the_remedy(
    host: HostServer, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Walled(host_connection.DirectLink):
        """Finds nothing at the actor's port."""

        def __init__(self, context: object, address: str, *rest: object) -> None:
            super().__init__(context, address.rpartition(":")[0] + ":9", *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(host_connection, "DirectLink", Walled)
    monkeypatch.setattr(host_connection, "LINK_WITHIN_S", 0.3)
    async with asyncio.timeout(60), Runtime() as runtime:
        with pytest.raises(ActorDied, match=r"does not answer within 0\.3 s.*--ports FIRST-LAST"):
            await runtime.spawn(Counter, placement=there(host, keys))
        assert host.num_actors == 0


async def test_an_actor_whose_connection_breaks_is_killed_by_its_host(
    host: HostServer, keys: Path, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_connection, "_OTHER_END_WITHIN_S", 0.1)
    counter = await runtime.spawn(Counter, placement=there(host, keys))
    pid = await counter.pid()
    pending = asyncio.ensure_future(counter.wait_for_gate("nobody opens it"))
    await counter.cancelled()
    (port,) = listening_ports(pid)
    cut_connection(port)
    with pytest.raises(ActorDied, match=f"127.0.0.1:{port} was lost, so it was killed"):
        await pending
    assert not Path(f"/proc/{pid}").exists()  # noqa: ASYNC240


async def test_what_a_process_sent_last_is_read_after_its_connection_has_ended() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    public, secret = zmq.curve_keypair()
    process = context.socket(zmq.PAIR)
    process.curve_server, process.curve_secretkey = True, secret
    port = process.bind_to_random_port("tcp://127.0.0.1")
    received: list[bytes] = []
    link = DirectLink(
        context,
        f"tcp://127.0.0.1:{port}",
        public.decode(),
        make_link_keys(),
        lambda frames: received.append(bytes(frames[0])),
        lambda: None,
    )
    async with asyncio.timeout(20):
        while not link.is_up:  # noqa: ASYNC110
            await asyncio.sleep(0)
    process.send(b"last words")
    process.close(linger=5000)
    while not link.is_lost:  # this loop reads nothing meanwhile
        link.read_events()
        time.sleep(0.05)  # noqa: ASYNC251
    link.deliver_received()
    assert received == [b"last words"]
    link.close()
    context.destroy(linger=0)


async def test_actors_listen_at_the_ports_of_their_host_and_no_other(keys: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    async with asyncio.timeout(60), serving(keys, ports=(port, port)) as host, Runtime() as runtime:
        counter = await runtime.spawn(Counter, placement=there(host, keys))
        assert listening_ports(await counter.pid()) == [port]
        with pytest.raises(ActorDied, match="exit code 1") as raised:
            await runtime.spawn(Counter, placement=there(host, keys))
        assert f"no port from {port} to {port} is free" in "".join(raised.value.stderr_tail)


def test_ports_that_do_not_exist_are_refused(keys: Path) -> None:
    with pytest.raises(ValueError, match="ports are 9 to 7, expected a first one and a last one"):
        HostServer("tcp://127.0.0.1:0", read_keys(keys / "server.key"), [], ports=(9, 7))


# ---- how a process starts there


FORKED = ForkServer(
    imports=("sample_actors",), prepare=(PrepareHook("hooks:remember", {"word": "far"}),)
)


async def test_actors_of_another_host_are_forked_from_one_server_there(
    host: HostServer, keys: Path
) -> None:
    placement = there(host, keys, fork_from=FORKED)
    async with asyncio.timeout(60), Runtime() as runtime:
        await runtime.prepare(placement)
        heirs = [await runtime.spawn(Heir, placement=placement) for _ in range(2)]
        (server,) = {await heir.parent() for heir in heirs}
        assert await heirs[0].made_by() == server
        assert await heirs[1].word() == "far"
    async with asyncio.timeout(60):
        while Path(f"/proc/{server}").exists():  # noqa: ASYNC110, ASYNC240
            await asyncio.sleep(0.05)


async def test_a_hook_that_fails_there_raises_here(
    host: HostServer, keys: Path, runtime: Runtime
) -> None:
    server = ForkServer(prepare=(PrepareHook("hooks:fail"),))
    with pytest.raises(FileNotFoundError, match=r"scene\.xml is missing"):
        await runtime.spawn(Heir, placement=there(host, keys, fork_from=server))


async def test_an_interpreter_that_cannot_run_actors_there_is_named(
    host: HostServer, keys: Path, runtime: Runtime, program_environment: dict[str, str]
) -> None:
    with pytest.raises(ConfigError, match="python is '/nowhere/python'"):
        await runtime.spawn(Counter, placement=there(host, keys, python="/nowhere/python"))
    env = {"PYTHONPATH": program_environment["PYTHONPATH"]}
    other = there(host, keys, python=sys.executable, env=env)
    counter = await runtime.spawn(Counter, placement=other)
    assert await counter.add(1) == 1


async def test_a_preparation_at_a_host_that_does_not_exist_is_given_up_in_time(
    host: HostServer, keys: Path, runtime: Runtime
) -> None:
    nowhere = msgspec.structs.replace(
        there(host, keys, fork_from=FORKED), address="tcp://127.0.0.1:9"
    )
    with pytest.raises(TimeoutError, match=r"no answer from tcp://127\.0\.0\.1:9 within 0\.5 s"):
        await runtime.spawn(Heir, placement=nowhere, start_timeout_s=0.5)


def test_variables_in_two_places_are_refused(keys: Path) -> None:
    with pytest.raises(ValueError, match=r"expected one of them; put all variables into process"):
        RemoteHost(
            address="tcp://10.0.0.2:7070",
            server_public_key="",
            client_keys=read_keys(keys / "client.key"),
            env={"A": "1"},
            process=ChildProcess(env={"B": "2"}),
        )
