"""A policy server answers every client in order, names mistakes, and loses no reply it owes."""

import asyncio
import json
import ssl
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from vla_rl.errors import ConfigError
from vla_rl.serving import Entry, ObservationReader, PolicyServer, ServerConfig
from vla_rl.serving.openpi_messages import decode_message, encode_message
from vla_rl.types import ActionChunk, Observation, Sampling
from vla_rl.util.listening import read_token

ENTRIES = {"state": Entry("vector", 1)}
LOCAL = ServerConfig(port=0)


class Echo:
    """Acts as the observation says, after a time of its own for some."""

    weight_version = 3

    def __init__(self, **delays_s: float) -> None:
        self.delays_s = {float(number): delay for number, delay in delays_s.items()}
        self.seeds: list[int] = []
        self.fails_once = False

    async def act(self, observation: Observation, sampling: Sampling) -> ActionChunk:
        self.seeds.append(sampling.seed)
        number = float(observation["state"][0])
        await asyncio.sleep(self.delays_s.get(number, 0.0))
        if self.fails_once:
            self.fails_once = False
            raise ValueError("another row of the batch")
        self.check(observation)
        actions = np.full((2, 3), number, np.float32)
        return ActionChunk(
            actions=actions, tokens=actions.ravel(), log_probs=np.zeros(6, np.float32),
            weight_version=self.weight_version,
        )  # fmt: skip

    def check(self, observation: Observation) -> None:
        if observation["state"][0] < 0:
            raise ValueError("the state is negative, expected at least 0")


@asynccontextmanager
async def serving(
    engine: Echo | None = None, config: ServerConfig = LOCAL
) -> AsyncIterator[PolicyServer]:
    engine = Echo() if engine is None else engine
    server = PolicyServer(
        engine, ObservationReader(ENTRIES, ()), config, Sampling(greedy=True),
        lambda: {"weight_version": engine.weight_version}, engine.check,
    )  # fmt: skip
    async with server:
        yield server


@asynccontextmanager
async def client(server: PolicyServer, **given: Any) -> AsyncIterator[ClientConnection]:
    """A client that has read the metadata."""
    async with connect(server.address, compression=None, max_size=None, **given) as connection:
        metadata = await connection.recv()
        assert isinstance(metadata, bytes)
        assert decode_message(metadata)["weight_version"] == 3
        yield connection


def state(number: float) -> bytes:
    return encode_message({"state": np.array([number])})


async def reply(connection: ClientConnection) -> dict[str, Any]:
    frame = await asyncio.wait_for(connection.recv(), 10.0)
    assert isinstance(frame, bytes), frame
    return decode_message(frame)


async def http_get(server: PolicyServer, path: str, header: str = "") -> tuple[int, str]:
    port = int(server.address.rpartition(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\n{header}\r\n".encode())
    answer = (await reader.read()).decode()
    writer.close()
    return int(answer.split()[1]), answer.partition("\r\n\r\n")[2]


async def test_a_reply_has_the_actions_the_weight_version_and_the_time() -> None:
    async with serving() as server, client(server) as connection:
        await connection.send(state(5))
        answer = await reply(connection)
    np.testing.assert_array_equal(answer["actions"], np.full((2, 3), 5))
    assert answer["actions"].dtype == np.float32
    assert answer["weight_version"] == 3
    assert answer["server_timing"]["infer_ms"] >= 0


async def test_replies_come_in_the_order_of_the_observations_with_several_in_flight() -> None:
    async with (
        serving(Echo(**{"0": 0.2, "1": 0.0, "2": 0.1})) as server,
        client(server) as connection,
    ):
        for number in (0, 1, 2, 3, 4, 5):
            await connection.send(state(number))
        answers = [(await reply(connection))["actions"][0, 0] for _ in range(6)]
    assert answers == [0, 1, 2, 3, 4, 5]


async def test_connections_do_not_wait_for_each_other_and_choose_differently() -> None:
    engine = Echo(**{"0": 5.0})
    config = ServerConfig(port=0, drain_timeout_s=0.1)
    async with serving(engine, config) as server, client(server) as slow, client(server) as quick:
        await slow.send(state(0))
        for number in (1, 2):
            await quick.send(state(number))
            assert (await reply(quick))["actions"][0, 0] == number
    assert len(set(engine.seeds)) == 3


@pytest.mark.parametrize(
    ("frame", "problem"),
    [
        (
            encode_message({"stat": np.array([1.0])}),
            "'stat' is unknown, expected state; the server's --map",
        ),
        (encode_message({"state": np.zeros(2)}), "'state' has 2 numbers, expected 1"),
        (b"\xc1", "no msgpack"),
        ("text", "the frame is text"),
        (state(-1), "the state is negative"),
    ],
)
async def test_a_bad_observation_is_named_and_the_connection_goes_on(
    frame: bytes | str, problem: str
) -> None:
    async with serving() as server, client(server) as connection:
        await connection.send(frame)
        error = await connection.recv()
        assert isinstance(error, str)
        assert problem in error
        await connection.send(state(2))
        assert (await reply(connection))["actions"][0, 0] == 2


async def test_a_client_gets_its_reply_although_another_spoiled_the_batch() -> None:
    engine = Echo()
    engine.fails_once = True
    async with serving(engine) as server, client(server) as connection:
        await connection.send(state(2))
        assert (await reply(connection))["actions"][0, 0] == 2


async def test_a_server_that_stops_answers_what_clients_have_sent() -> None:
    engine = Echo(**{str(number): 0.2 for number in range(4)})
    async with asyncio.timeout(20), connect_all(engine, 8) as (server, connections):
        for number, connection in enumerate(connections):
            await connection.send(state(number % 4))
            await connection.send(state(number % 4))
        stopping = asyncio.create_task(server.__aexit__(None, None, None))
        for number, connection in enumerate(connections):
            for _ in range(2):
                assert (await reply(connection))["actions"][0, 0] == number % 4
            with pytest.raises(ConnectionClosed) as closed:
                await connection.recv()
            assert closed.value.rcvd is not None
            assert closed.value.rcvd.code == 1001
        await stopping


async def test_a_client_that_never_pauses_does_not_keep_a_server_from_stopping() -> None:
    async with asyncio.timeout(20), connect_all(Echo(), 1) as (server, [connection]):
        num_asked = num_answered = 0

        async def ask_on() -> None:
            nonlocal num_asked, num_answered
            while True:
                await connection.send(state(1))
                num_asked += 1
                await reply(connection)
                num_answered += 1

        asking = asyncio.create_task(ask_on())
        await asyncio.sleep(0.1)
        started_at = time.monotonic()
        await server.__aexit__(None, None, None)
        # well below the 10 s after which connections are cut
        assert time.monotonic() - started_at < 5.0
        with pytest.raises(ConnectionClosed) as closed:
            await asking
    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == 1001
    # at most the one that was sent while the server closed
    assert num_answered > 0
    assert num_asked - num_answered <= 1


async def test_a_policy_that_fails_is_told_to_its_client_and_serves_on() -> None:
    class Fails(Echo):
        def check(self, observation: Observation) -> None:
            if observation["state"][0] == 9:
                raise RuntimeError("out of memory")

    async with serving(Fails()) as server, client(server) as connection:
        await connection.send(state(9))
        assert await connection.recv() == "the policy failed: RuntimeError: out of memory"
        await connection.send(state(2))
        assert (await reply(connection))["actions"][0, 0] == 2


@asynccontextmanager
async def connect_all(
    engine: Echo, count: int
) -> AsyncIterator[tuple[PolicyServer, list[ClientConnection]]]:
    server = PolicyServer(
        engine, ObservationReader(ENTRIES, ()), LOCAL, Sampling(greedy=True), dict, engine.check
    )  # fmt: skip
    await server.__aenter__()
    connections = [await connect(server.address, compression=None) for _ in range(count)]
    for connection in connections:
        await connection.recv()
    yield server, connections


async def test_clients_beyond_the_limit_are_told_why_and_the_old_ones_are_served() -> None:
    config = ServerConfig(port=0, max_connections=1)
    async with serving(config=config) as server, client(server) as connection:
        with pytest.raises(InvalidStatus) as refused:
            await connect(server.address)
        assert refused.value.response.status_code == 503
        assert refused.value.response.body is not None
        assert b"1 connections are open" in refused.value.response.body
        await connection.send(state(1))
        await reply(connection)


async def test_a_client_that_never_reads_is_disconnected_alone() -> None:
    class Wide(Echo):
        async def act(self, observation: Observation, sampling: Sampling) -> ActionChunk:
            chunk = await super().act(observation, sampling)
            if chunk.actions[0, 0] == 9:  # 32 MB do not fit into any socket's buffer
                import msgspec

                return msgspec.structs.replace(chunk, actions=np.zeros((1000, 8000), np.float32))
            return chunk

    config = ServerConfig(port=0, send_timeout_s=0.3)
    async with (
        serving(Wide(), config) as server,
        client(server) as good,
        client(server, max_queue=1) as deaf,
    ):
        deaf.transport.pause_reading()
        await deaf.send(state(9))
        await asyncio.sleep(0.8)
        await good.send(state(1))
        assert (await reply(good))["actions"][0, 0] == 1
        assert "connections 1\n" in (await http_get(server, "/metrics"))[1]
        deaf.transport.abort()


async def test_a_frame_beyond_the_limit_ends_its_connection_before_it_is_read() -> None:
    config = ServerConfig(port=0, max_message_mb=1)
    async with serving(config=config) as server, client(server) as good, client(server) as bad:
        # the header of a masked binary frame of 2 GB, and nothing of it
        bad.transport.write(b"\x82\xff" + (2 << 30).to_bytes(8) + b"\0\0\0\0")
        with pytest.raises(ConnectionClosed) as closed:
            await asyncio.wait_for(bad.recv(), 5.0)
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1009
        await good.send(state(1))
        await reply(good)


async def test_health_and_latencies_are_shown_over_http() -> None:
    async with serving() as server, client(server) as connection:
        await connection.send(state(1))
        await reply(connection)
        await connection.send(b"")
        await connection.recv()
        status, health = await http_get(server, "/healthz")
        assert (status, json.loads(health)["weight_version"]) == (200, 3)
        _, metrics = await http_get(server, "/metrics")
    assert "vla_rl_serve_weight_version 3\n" in metrics
    assert '#0"} 2\n' in metrics  # replies
    assert '#0"} 1\n' in metrics  # errors
    assert '#0",quantile="0.99"} ' in metrics


async def test_a_token_is_asked_for_in_the_header_alone(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("0123456789abcdef\n")
    config = ServerConfig(port=0, token_file=str(file))
    async with serving(config=config) as server:
        headers = {"Authorization": "Api-Key 0123456789abcdef"}
        async with client(server, additional_headers=headers) as connection:
            await connection.send(state(1))
            await reply(connection)
        for address, given in [
            (server.address, {}),
            (f"{server.address}/?token=0123456789abcdef", {}),
            (server.address, {"Authorization": "0123456789abcdef"}),
            (server.address, {"Authorization": "Api-Key 0123456789abcdeF"}),
            (server.address, {"Api-Key": "0123456789abcdef"}),
        ]:
            with pytest.raises(InvalidStatus) as refused:
                await connect(address, additional_headers=given)
            assert refused.value.response.status_code == 401
            assert b"Authorization: Api-Key TOKEN" in (refused.value.response.body or b"")
        assert (await http_get(server, "/metrics"))[0] == 401
        assert (await http_get(server, "/healthz"))[0] == 200


async def test_with_a_certificate_clients_use_tls(tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    request = "openssl req -x509 -newkey ed25519 -nodes -subj /CN=localhost"
    command = f"{request} -keyout {key} -out {certificate}".split()
    await asyncio.to_thread(subprocess.run, command, check=True, capture_output=True)
    config = ServerConfig(port=0, tls_certificate=str(certificate), tls_key=str(key))
    async with serving(config=config) as server:
        assert server.address.startswith("wss://")
        context = ssl.create_default_context(cafile=str(certificate))
        context.check_hostname = False
        async with client(server, ssl=context) as connection:
            await connection.send(state(1))
            await reply(connection)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "robot.lab"])
def test_an_address_for_other_machines_needs_a_token_and_tls(host: str) -> None:
    with pytest.raises(ConfigError, match="token_file and tls_certificate are not set"):
        ServerConfig(host=host)


def test_a_short_token_is_refused_with_what_makes_a_good_one(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("secret")
    with pytest.raises(ConfigError, match="openssl rand -hex 32"):
        read_token(str(file))


async def test_a_port_in_use_is_one_clear_error() -> None:
    async with serving() as server:
        port = int(server.address.rpartition(":")[2])
        with pytest.raises(ConfigError, match=r"choose another --server\.port"):
            async with serving(config=ServerConfig(port=port)):
                pass
