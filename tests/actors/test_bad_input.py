"""Random bytes, truncated frames and oversized messages: counted, logged once, harmless."""

import asyncio
import random
import resource
import secrets
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zmq
from sample_actors import Counter

from vla_rl.actors import KeyPair, RemoteHost, Runtime, host as host_module, make_keys, read_keys
from vla_rl.actors.calls.actor import get_method_table
from vla_rl.actors.calls.client import ActorClient
from vla_rl.actors.calls.pending import ActorState
from vla_rl.actors.calls.server import ActorServer
from vla_rl.actors.host import HostServer
from vla_rl.actors.remote.direct_link import set_tcp_options
from vla_rl.actors.wire.codec import Codec
from vla_rl.actors.wire.envelope import ExitNotice, Frames, Kind
from vla_rl.errors import ActorDied
from vla_rl.util.stalls import LoopLag

LOST_AFTER_S = 30.0
"""None of these connections is lost, however long a busy machine holds up one of its ends."""


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("host") / "keys"
    make_keys(folder, ("client", "stranger"))
    return folder


@pytest.fixture
async def host(keys: Path) -> AsyncIterator[HostServer]:
    server, client = read_keys(keys / "server.key"), read_keys(keys / "client.key")
    async with HostServer(
        "tcp://127.0.0.1:0", server, [client.public], lost_after_s=LOST_AFTER_S
    ) as opened:
        yield opened


def placement(host: HostServer, keys: Path, client: str = "client") -> RemoteHost:
    public = read_keys(keys / "server.key").public
    return RemoteHost(
        address=host.address,
        server_public_key=public,
        client_keys=read_keys(keys / f"{client}.key"),
        lost_after_s=LOST_AFTER_S,
    )


def raw_client(
    context: "zmq.Context[zmq.Socket[bytes]]", host: HostServer, keys: Path, own: KeyPair
) -> "zmq.Socket[bytes]":
    socket = context.socket(zmq.DEALER)
    set_tcp_options(socket, LOST_AFTER_S)
    socket.curve_serverkey = read_keys(keys / "server.key").public.encode()
    socket.curve_publickey, socket.curve_secretkey = own.public.encode(), own.secret.encode()
    socket.connect(host.address)
    return socket


def mutate(chance: random.Random, frames: Frames) -> list[bytes]:
    """Cut, flip, repeat or replace some bytes of a message that was a good one."""
    head = bytearray(frames[0])
    way = chance.randrange(5)
    if way == 0:
        return [bytes(head[: chance.randrange(len(head))]), *frames[1:]]
    if way == 1:
        for _ in range(chance.randrange(1, 8)):
            head[chance.randrange(len(head))] = chance.randrange(256)
        return [bytes(head), *frames[1:]]
    if way == 2:
        return [
            bytes(head),
            *(bytes(frame)[: chance.randrange(len(frame) + 1)] for frame in frames[1:]),
        ]
    if way == 3:
        return [bytes(head)]
    return [chance.randbytes(chance.randrange(60)) for _ in range(chance.randrange(1, 4))]


async def test_a_hundred_thousand_broken_messages_do_not_disturb_an_actor(
    caplog: pytest.LogCaptureFixture,
) -> None:
    chance = random.Random(7)
    codec, table, counter, lag = Codec(), get_method_table(Counter), Counter(), LoopLag()
    answers: list[Frames] = []
    server = ActorServer(
        counter, table, codec, 0, answers.append, mailbox=64, lag=lag, at_once=False
    )
    serving = asyncio.create_task(server.serve())
    name_of = {entry.name: entry.index for entry in table.methods}
    good = [
        codec.encode(Kind.CALL, name_of["add"], 0, 5, (1,), "add"),
        codec.encode(Kind.CALL, name_of["echo"], 0, 6, ({"a": [1, "x", None, 2.5]},), "echo"),
        codec.encode(Kind.CALL, name_of["echo_array"], 0, 7, (np.zeros(6000),), "echo_array"),
        codec.encode(
            Kind.CALL,
            name_of["echo_labelled"],
            0,
            8,
            ([{"label": "a", "values": np.ones(3)}],),
            "echo",
        ),
        codec.encode(Kind.CREDIT, 3, 0, 5, None, "credit"),
        codec.encode(Kind.CANCEL, 0, 0, 5, None, "cancel"),
    ]
    keep_off = {
        Kind.STOP,
        *(name_of[name] for name in ("block", "work", "say_and_exit", "wait_for_gate")),
    }
    memory_before = 0
    for number in range(100_000):
        if number == 20_000:
            memory_before = resident_kib()
        frames = mutate(chance, good[number % len(good)])
        if len(frames[0]) >= 4 and (frames[0][1] == Kind.STOP or frames[0][2] in keep_off):
            continue  # a good message by chance, which would end the test
        server.on_message(frames)
        if number % 50 == 0:
            await asyncio.sleep(0)
            answers.clear()
    grown_kib = resident_kib() - memory_before
    assert server.num_rejected > 10_000
    assert memory_before > 0
    assert grown_kib < 10_000
    assert len([record for record in caplog.records if "rejected a message" in record.message]) == 1
    server.on_message(codec.encode(Kind.STOP, 0, 0, 0, None, "stop"))
    async with asyncio.timeout(10):
        await serving
    lag.stop_sampling()


async def test_a_hundred_thousand_broken_answers_do_not_disturb_a_caller(
    caplog: pytest.LogCaptureFixture,
) -> None:
    chance = random.Random(8)
    channel = Loopback()
    client = ActorClient(
        "victim",
        get_method_table(Counter),
        mailbox=8,
        deadlines_s=[None] * len(get_method_table(Counter).methods),
    )
    client.attach_channel(channel)
    good = [
        channel.codec.encode(Kind.RESULT, 0, 0, 1, {"a": np.ones(9000)}, "result"),
        channel.codec.encode(
            Kind.ERROR, 0, 0, 1, ["builtins", "ValueError", "x", ["x"], {}, "trace"], "error"
        ),
        channel.codec.encode(Kind.ITEM, 0, 0, 1, 3, "item"),
        channel.codec.encode(Kind.END, 0, 0, 1, None, "end"),
    ]
    for number in range(100_000):
        client.on_message(mutate(chance, good[number % len(good)]))
    assert client.num_rejected == 100_000  # nobody has called anything
    assert len(caplog.records) == 1
    assert client.state is ActorState.RUNNING


def resident_kib() -> int:
    """Memory that this process has now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() // 1024


class Loopback:
    """A channel to nowhere."""

    pid = 1
    actor_id = 0
    unanswered = ""
    has_room = True

    def __init__(self) -> None:
        self.codec = Codec()
        self.on_message: Callable[[Frames], None] = lambda frames: None

    def send_message(self, frames: Frames) -> None:
        """Drop it."""

    async def until_room(self) -> None:
        """Always."""

    def poll(self) -> None:
        """Nothing comes."""

    def kill_incarnation(self) -> None:
        """Nothing to kill."""

    async def until_gone(self) -> None:
        """Gone already."""


def test_keys_of_another_client_are_added_and_none_is_replaced(tmp_path: Path) -> None:
    make_keys(tmp_path, ("one",))
    server = read_keys(tmp_path / "server.key")
    make_keys(tmp_path, ("two",))
    assert read_keys(tmp_path / "server.key") == server
    assert read_keys(tmp_path / "two.key") != read_keys(tmp_path / "one.key")
    with pytest.raises(FileExistsError):
        make_keys(tmp_path, ("one",))


async def test_a_client_that_sends_rubbish_does_not_disturb_another(
    host: HostServer, keys: Path
) -> None:
    chance = random.Random(9)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    rubbish = raw_client(context, host, keys, read_keys(keys / "client.key"))
    async with asyncio.timeout(60), Runtime() as runtime:
        counter = await runtime.spawn(Counter, placement=placement(host, keys))
        for number in range(20_000):
            rubbish.send_multipart(
                [chance.randbytes(chance.randrange(40)) for _ in range(chance.randrange(1, 4))]
            )
            if number % 500 == 0:
                await counter.add(1)
        while host.num_rejected < 20_000:
            await counter.add(0)
        assert await counter.total() == 40
        assert host.num_rejected == 20_000
        assert host.num_actors == 1
    context.destroy(linger=0)


async def test_a_launch_that_another_version_sends_is_answered_with_the_remedy(
    host: HostServer, keys: Path
) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    client = raw_client(context, host, keys, read_keys(keys / "client.key"))
    client.send_multipart(Codec().encode(Kind.LAUNCH, 0, 1, 0, ["name", {}], "launch"))
    async with asyncio.timeout(20):
        while not client.poll(0):  # noqa: ASYNC110
            await asyncio.sleep(0)
    notice = Codec().decode(Codec().get_decoder(ExitNotice), client.recv_multipart())
    assert "could not be started: LaunchRequest: " in notice.cause
    assert "Install the same version of vla_rl on both hosts" in notice.cause
    assert (host.num_rejected, host.num_actors) == (1, 0)
    context.destroy(linger=0)


async def test_a_client_that_sends_too_much_at_once_is_dropped_and_the_others_stay(
    host: HostServer, keys: Path
) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    greedy = raw_client(context, host, keys, read_keys(keys / "client.key"))
    monitor = greedy.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    async with asyncio.timeout(60), Runtime() as runtime:
        counter = await runtime.spawn(Counter, placement=placement(host, keys))
        before = await counter.add(1)
        greedy.send(secrets.token_bytes(1 << 21))
        while not monitor.poll(0):
            await counter.add(1)
        assert await counter.add(1) > before
    monitor.close()
    context.destroy(linger=0)


GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)
"""First words of any ZeroMQ peer that wants to encrypt."""


def stranger_at(host: HostServer) -> socket.socket:
    """A plain connection whose greeting was answered."""
    port = int(host.address.rpartition(":")[2])
    connection = socket.create_connection(("127.0.0.1", port), timeout=30)
    connection.sendall(GREETING)
    received = b""
    while len(received) < len(GREETING):
        received += connection.recv(len(GREETING) - len(received))
    return connection


@pytest.mark.parametrize("flags", [0x06, 0x02], ids=["command", "message"])
async def test_a_stranger_that_announces_a_gigabyte_is_dropped_at_once(
    host: HostServer, flags: int
) -> None:
    async with asyncio.timeout(60):
        with await asyncio.to_thread(stranger_at, host) as stranger:
            stranger.sendall(bytes([flags]) + (1 << 30).to_bytes(8, "big"))
            assert await asyncio.to_thread(stranger.recv, 1) == b""


async def test_a_stranger_that_says_nothing_is_dropped_after_its_time(
    keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_module, "HANDSHAKE_WITHIN_MS", 300)
    server, client = read_keys(keys / "server.key"), read_keys(keys / "client.key")
    async with (
        asyncio.timeout(60),
        HostServer("tcp://127.0.0.1:0", server, [client.public]) as opened,
    ):
        with await asyncio.to_thread(stranger_at, opened) as stranger:
            assert await asyncio.to_thread(stranger.recv, 1) == b""


async def test_a_peer_without_a_known_key_gets_nothing(host: HostServer, keys: Path) -> None:
    async with asyncio.timeout(30), Runtime() as runtime:
        with pytest.raises(
            ActorDied, match="rejected our key, or does not have the expected server key"
        ):
            await runtime.spawn(Counter, placement=placement(host, keys, "stranger"))
        assert host.num_refused >= 1
        assert host.num_actors == 0


async def test_a_peer_without_encryption_gets_nothing(host: HostServer) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    plain = context.socket(zmq.DEALER)
    monitor = plain.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
    plain.connect(host.address)
    plain.send(Codec().encode(Kind.LAUNCH, 0, 1, 0, ["intruder", {}], "launch")[0])
    async with asyncio.timeout(20):
        while not monitor.poll(0):  # noqa: ASYNC110  a plain socket, not on the loop
            await asyncio.sleep(0)
    assert plain.poll(0) == 0
    assert host.num_actors == 0
    monitor.close()
    context.destroy(linger=0)


async def test_a_client_does_not_talk_to_a_server_whose_key_it_does_not_know(
    host: HostServer, keys: Path
) -> None:
    impostor = RemoteHost(
        address=host.address,
        server_public_key=read_keys(keys / "stranger.key").public,
        client_keys=read_keys(keys / "client.key"),
    )
    async with asyncio.timeout(30), Runtime() as runtime:
        with pytest.raises(ActorDied, match="does not have the expected server key"):
            await runtime.spawn(Counter, placement=impostor)


async def test_a_host_that_does_not_exist_is_given_up_in_time(keys: Path) -> None:
    nowhere = RemoteHost(
        address="tcp://127.0.0.1:9",
        server_public_key=read_keys(keys / "server.key").public,
        client_keys=read_keys(keys / "client.key"),
    )
    async with asyncio.timeout(30), Runtime() as runtime:
        with pytest.raises(
            TimeoutError,
            match=r"not ready within 0\.5 s: no answer from tcp://127\.0\.0\.1:9; expected",
        ):
            await runtime.spawn(Counter, placement=nowhere, start_timeout_s=0.5)


async def test_an_environment_that_no_process_can_have_is_answered_and_the_host_serves_on(
    host: HostServer, keys: Path
) -> None:
    there = placement(host, keys)
    async with asyncio.timeout(60), Runtime() as runtime:
        with pytest.raises(
            ActorDied, match="could not be started: illegal environment variable name"
        ):
            await runtime.spawn(Counter, placement=msgspec.structs.replace(there, env={"A=B": "x"}))
        counter = await runtime.spawn(Counter, placement=there)
        assert await counter.add(1) == 1


def test_a_port_that_is_used_is_said_in_one_line(keys: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        command = [sys.executable, "-m", "vla_rl.actors.host", "--bind", address]
        command += ["--keys", str(keys / "server.key"), "--allow", str(keys / "client.pub")]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert ended.stderr.splitlines() == [
        f"actors cannot be served on {address!r}: Address already in use; expected "
        "tcp://interface:port of this host, "
        "with a free port, or 0 for any free port."
    ]
