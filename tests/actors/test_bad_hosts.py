"""Hosts are reached with their keys; one that lies or lacks its key is refused."""

import asyncio
import contextlib
import logging
import os
import select
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from sample_actors import Counter

from benchmarks.hosts.namespaces import NamespaceHost, NamespacesRefused, network_namespaces
from vla_rl.actors import (
    Actor,
    ChildProcess,
    ForkServer,
    RemoteHost,
    Runtime,
    make_keys,
    read_keys,
    read_public_key,
    supervision,
)
from vla_rl.actors.host import HostServer
from vla_rl.actors.placement import KeyPair, is_key
from vla_rl.actors.remote import host_connection, hosted_clients
from vla_rl.actors.remote.direct_link import make_link_keys
from vla_rl.actors.remote.hosted_clients import HostedClient
from vla_rl.actors.wire.envelope import Kind
from vla_rl.errors import ActorDied, ConfigError

KEY = make_link_keys().public


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bad_hosts") / "keys"
    make_keys(folder)
    return folder


@pytest.fixture
async def host(keys: Path) -> AsyncIterator[HostServer]:
    server, client = read_keys(keys / "server.key"), read_keys(keys / "client.key")
    async with asyncio.timeout(60), HostServer("tcp://127.0.0.1:0", server, [client.public]) as it:
        yield it


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_connection, "_OTHER_END_WITHIN_S", 0.2)


def there(host: HostServer, keys: Path, process: ChildProcess | None = None) -> RemoteHost:
    return RemoteHost(
        address=host.address,
        server_public_key=read_keys(keys / "server.key").public,
        client_keys=read_keys(keys / "client.key"),
        process=process or ChildProcess(),
    )


def answer_launches(monkeypatch: pytest.MonkeyPatch, start: Any) -> None:
    """Have every host answer a launch with this hello, start nothing, and be silent afterwards."""

    def launch(self: HostedClient, actor: int, _request: object) -> None:
        self._send(self._codec.encode(Kind.HELLO, 0, actor, 0, start, "hello"))

    monkeypatch.setattr(HostedClient, "launch_process", launch)


@pytest.mark.parametrize(
    ("start", "words"),
    [
        ((7, -1, KEY), "sent what cannot be used: address 'tcp://127.0.0.1:-1'"),
        ((7, 70_000, KEY), "expected a port of 1 to 65535"),
        ((7, 0, KEY), "expected a port of 1 to 65535"),
        ((7, 7070, "short"), "key 'short', expected 40 characters"),
        ((7, 7070, "~" * 40), "expected 40 characters of Z85"),
        ((7, 7070, "#" * 40), "expected 40 characters of Z85"),
        ((7, "a port", KEY), "Expected `int`, got `str`"),
        ((7, 7070, b"\xff" * 40), "Expected `str`"),
        (None, "Expected `array`, got `None`"),
        (3, "Expected `array`, got `int`"),
    ],
)
async def test_a_hello_that_no_process_sends_ends_the_spawn_with_what_is_wrong(
    host: HostServer, keys: Path, monkeypatch: pytest.MonkeyPatch, start: Any, words: str
) -> None:
    answer_launches(monkeypatch, start)
    async with Runtime() as runtime:
        with pytest.raises(ActorDied, match=r"its host at tcp://127\.0\.0\.1") as caught:
            await runtime.spawn(Counter, placement=there(host, keys), start_timeout_s=20.0)
    assert words in str(caught.value)


async def test_a_host_that_is_silent_after_its_hello_ends_the_spawn_at_its_timeout(
    host: HostServer, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer_launches(monkeypatch, (7, 9, KEY))  # a port at which nothing listens
    async with Runtime() as runtime:
        with pytest.raises(TimeoutError, match=r"was not ready within 0\.3 s: no answer from"):
            await runtime.spawn(Counter, placement=there(host, keys), start_timeout_s=0.3)


async def test_a_host_that_does_not_report_an_end_does_not_hold_up_the_kill(
    host: HostServer, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Runtime(stop_grace_s=0.2) as runtime:
        counter = await runtime.spawn(Counter, placement=there(host, keys))
        with monkeypatch.context() as patched:
            patched.setattr(HostedClient, "kill_process", lambda self, actor: None)
            await runtime.kill(counter)
        with pytest.raises(ActorDied):
            await counter.add(1)


async def test_a_start_that_fails_with_a_name_that_is_no_text_is_reported(
    host: HostServer, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise FileNotFoundError("caf\udce9 is missing")

    monkeypatch.setattr(hosted_clients, "ChildChannel", fail)
    async with Runtime() as runtime:
        with pytest.raises(ActorDied, match=r"could not be started: caf\\udce9 is missing"):
            await runtime.spawn(Counter, placement=there(host, keys), start_timeout_s=20.0)


@pytest.mark.parametrize("answers", [None, [1, 2]], ids=["nothing", "a report of another form"])
async def test_a_preparation_ends_whatever_the_host_answers(
    host: HostServer, keys: Path, monkeypatch: pytest.MonkeyPatch, answers: Any
) -> None:
    def prepare(self: HostedClient, call: int, _process: object) -> None:
        if answers is not None:
            self._send(self._codec.encode(Kind.ERROR, 0, 0, call, answers, "preparation"))

    monkeypatch.setattr(HostedClient, "prepare_process", prepare)
    monkeypatch.setattr(HostServer, "_is_there", lambda *_: True)  # without a sign of life
    process = ChildProcess(fork_from=ForkServer())
    async with Runtime() as runtime:
        with pytest.raises((TimeoutError, ActorDied)) as caught:
            await runtime.spawn(Counter, placement=there(host, keys, process), start_timeout_s=0.5)
    words = (
        "was silent for 0.5" if answers is None else "its answer cannot be read: Expected `array`"
    )
    assert words in str(caught.value)


async def test_a_host_that_lives_and_never_answers_a_preparation_is_given_up(
    host: HostServer, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HostedClient, "prepare_process", lambda *_: None)
    monkeypatch.setattr(ChildProcess, "most_preparation_s", 1.5)
    process = ChildProcess(fork_from=ForkServer())
    async with Runtime() as runtime:
        with pytest.raises(TimeoutError, match=r"did not answer within 1\.5 s while it prepared"):
            await runtime.spawn(Counter, placement=there(host, keys, process), start_timeout_s=10.0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"server_public_key": "short"}, "server_public_key for .* has 5 characters"),
        ({"client_keys": KeyPair(public=KEY, secret="")}, "client_keys.secret for .* has 0"),
        ({"address": "tcp://somewhere"}, "address is 'tcp://somewhere', expected tcp://host:port"),
        ({"address": "tcp://127.0.0.1:99999"}, "with a port of 1 to 65535"),
    ],
)
async def test_keys_and_addresses_that_no_host_has_are_refused_by_name(
    host: HostServer, keys: Path, changes: dict[str, Any], words: str
) -> None:

    placement = msgspec.structs.replace(there(host, keys), **changes)
    async with Runtime() as runtime:
        with pytest.raises(ConfigError, match=words):
            await runtime.spawn(Counter, placement=placement)


def test_a_key_is_what_zeromq_reads_as_one() -> None:
    assert all(is_key(make_link_keys().public) for _ in range(100))
    assert not any(map(is_key, ("", KEY[1:], KEY + "0", KEY[:-1] + " ", "#" * 40, "\u0664" * 40)))


class Stubborn(Actor):
    """Ends only once the gate is open, whoever cancels it."""

    def __init__(self, gate: asyncio.Event) -> None:
        self._gate = gate

    async def on_stop(self) -> None:
        while not self._gate.is_set():
            try:
                await self._gate.wait()
            except asyncio.CancelledError:
                continue


async def test_an_actor_that_does_not_end_when_it_is_killed_holds_up_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(supervision, "GONE_WITHIN_S", 0.2)
    gate = asyncio.Event()
    async with asyncio.timeout(30), Runtime(stop_grace_s=0.1) as runtime:
        stubborn = await runtime.spawn(Stubborn, gate, name="stubborn")
        await runtime.stop(stubborn)
        assert runtime.info(stubborn).state == "stopped"
    (line,) = [each.getMessage() for each in caplog.records if each.levelno == logging.ERROR]
    assert "actor stubborn (pid 0): it was killed and has not ended within 0.2 s" in line
    gate.set()
    await asyncio.sleep(0)


@pytest.fixture
def second_host() -> Iterator[NamespaceHost]:
    """Another host than the one that this test runs on."""
    with contextlib.ExitStack() as opened:
        try:
            near, other = opened.enter_context(network_namespaces(2))
        except NamespacesRefused as reason:
            pytest.skip(str(reason))
        opened.enter_context(near.entered())
        yield other


@pytest.fixture
def placement(
    second_host: NamespaceHost, tmp_path: Path, program_environment: dict[str, str]
) -> RemoteHost:
    keys = tmp_path / "keys"
    make_keys(keys)
    command = [
        sys.executable,
        "-m",
        "vla_rl.actors.host",
        "--bind",
        f"tcp://{second_host.address}:0",
    ]
    command += ["--keys", str(keys / "server.key"), "--allow", str(keys / "client.pub")]
    command += ["--lost-after", "3"]
    server = second_host.popen(command, stdout=subprocess.PIPE, text=True, env=program_environment)
    assert server.stdout is not None
    with server.stdout as words:
        address = words.readline().split()[-1]
    return RemoteHost(
        address=address,
        server_public_key=read_public_key(keys / "server.pub"),
        client_keys=read_keys(keys / "client.key"),
        lost_after_s=3.0,
    )


@pytest.mark.needs_root
async def test_a_pulled_cable_fails_the_calls_here_and_ends_the_actor_there(
    second_host: NamespaceHost, placement: RemoteHost
) -> None:
    async with asyncio.timeout(100), Runtime(stop_grace_s=0.5) as runtime:
        counter = await runtime.spawn(Counter, name="far away", placement=placement)
        pixels = np.ones(3_000_000, np.uint8)
        assert np.array_equal(await counter.echo_array(pixels), pixels)
        assert min(second_host.carried_bytes()) > pixels.nbytes
        actor = os.pidfd_open(await counter.pid())
        pending = asyncio.ensure_future(counter.wait_for_gate("nobody opens it"))
        await counter.cancelled()
        second_host.pull_cable()
        with pytest.raises(
            ActorDied, match=r"far away.*connection to tcp://10\.77\.0\.2:.* is lost"
        ):
            await pending
        assert await asyncio.to_thread(select.select, [actor], [], [], 60)
        os.close(actor)
        second_host.plug_in_cable()
        again = await runtime.spawn(Counter, placement=placement)
        assert await again.add(1) == 1


def test_each_name_has_a_secret_pair_and_a_public_key(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys", ["desk"])
    for name in ("server", "desk"):
        secret = tmp_path / "keys" / f"{name}.key"
        assert secret.stat().st_mode & 0o777 == 0o600
        public = read_public_key(secret.with_suffix(".pub"))
        assert read_keys(secret).public == public
    assert read_keys(secret).secret != public


def test_a_key_is_never_replaced_and_the_servers_is_made_once(tmp_path: Path) -> None:
    make_keys(tmp_path, ["desk"])
    server = read_keys(tmp_path / "server.key")
    make_keys(tmp_path, ["other"])
    assert read_keys(tmp_path / "server.key") == server
    with pytest.raises(FileExistsError, match=r"desk\.key"):
        make_keys(tmp_path, ["desk"])


def test_another_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.key").write_text("no JSON")
    (tmp_path / "x.pub").write_text("short\n")
    with pytest.raises(ValueError, match=r"x\.key is not a key file"):
        read_keys(tmp_path / "x.key")
    with pytest.raises(ValueError, match=r"x\.pub holds 5 characters, expected a public key of 40"):
        read_public_key(tmp_path / "x.pub")
