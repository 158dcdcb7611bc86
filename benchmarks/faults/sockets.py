"""Fuzzed sockets: garbage, cut-off and oversized messages, and silence, at a host of actors and at
an endpoint.
"""

import asyncio
import contextlib
import json
import random
import socket
import struct
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import psutil

from benchmarks.faults.leftovers import nothing_left, num_descriptors
from benchmarks.faults.one_try import Try
from benchmarks.faults.targets import ANSWERS_WITHIN_S, Target
from vla_rl.actors import Actor, RemoteHost, Runtime, make_keys, read_keys, read_public_key

_STRANGERS: Final = 150
_MORE_MB: Final = 256
"""Most memory that strangers may cost a server: well above the cache of an allocator, well below
one huge frame."""

_ZMTP_GREETING: Final = (
    b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + b"\0" + bytes(31)
)


class Echo(Actor):
    """Returns its argument."""

    async def echo(self, words: str) -> str:
        """Return the words."""
        return words


def fuzzed_hosts(case: Try) -> None:
    """Send garbage to a host of actors.

    It must still serve a client with a key, and hold nothing for the strangers.
    """
    keys = case.folder / "keys"
    make_keys(keys)
    arguments = (
        "--bind",
        "tcp://127.0.0.1:0",
        "--keys",
        str(keys / "server.key"),
        "--allow",
        str(keys / "client.pub"),
    )
    with nothing_left(case), Target(case, "vla_rl.actors.host", arguments) as host:
        line = host.until_line("serving actors on ")
        if line is None:
            case.expect(False, "the host did not start")
            return
        address = line.rpartition(" ")[2]
        port = int(address.rpartition(":")[2])
        asyncio.run(_spawn_and_call(keys, address))
        with _costs_nothing(case, host):
            for _ in range(_STRANGERS):
                _throw(port, _hostile_zmtp(case.dice))
            asyncio.run(_spawn_and_call(keys, address))


def fuzzed_endpoints(case: Try) -> None:
    """Send garbage to an endpoint.

    It must still answer a client with a key, and hold nothing for the strangers.
    """
    with nothing_left(case), Target(case, "benchmarks.faults.endpoint_target") as endpoint:
        line = endpoint.until_line("serving ")
        if line is None:
            case.expect(False, "the endpoint did not start")
            return
        _, base_url, key = line.split()
        port = int(base_url.split(":")[2].split("/")[0])
        case.expect(
            _asks(base_url, key) == 200, "the endpoint did not answer before any stranger came"
        )
        with _costs_nothing(case, endpoint):
            for _ in range(_STRANGERS):
                _throw(port, _hostile_http(case.dice, key))
            case.expect(
                _asks(base_url, key) == 200, "the endpoint did not answer after the strangers"
            )


@contextlib.contextmanager
def _costs_nothing(case: Try, target: Target) -> Iterator[None]:
    process = psutil.Process(target.process.pid)
    descriptors, rss = num_descriptors(process.pid), process.memory_info().rss
    yield
    case.expect(target.process.poll() is None, "the server died")
    until = time.monotonic() + ANSWERS_WITHIN_S
    while (more := num_descriptors(process.pid) - descriptors) > 2 and time.monotonic() < until:
        time.sleep(0.1)
    if more > 2:  # a connection pool may keep one or two
        case.left_behind.append(f"{more} descriptors of {' '.join(process.cmdline()[1:4])}")
    more_mb = (process.memory_info().rss - rss) / 2**20
    case.expect(
        more_mb < _MORE_MB,
        f"strangers cost the server {more_mb:.0f} MiB, expected less than {_MORE_MB}",
    )


async def _spawn_and_call(keys: Path, address: str) -> None:
    placement = RemoteHost(
        address=address,
        server_public_key=read_public_key(keys / "server.pub"),
        client_keys=read_keys(keys / "client.key"),
    )
    async with asyncio.timeout(ANSWERS_WITHIN_S), Runtime() as runtime:
        echo = await runtime.spawn(Echo, placement=placement)
        assert await echo.echo("still here") == "still here"


def _asks(base_url: str, key: str) -> int:
    body = json.dumps(
        {"model": "policy", "messages": [{"role": "user", "content": "hello"}]}
    ).encode()
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{base_url}/chat/completions", body, headers)
    try:
        with urllib.request.urlopen(request, timeout=ANSWERS_WITHIN_S) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def _throw(port: int, data: bytes) -> None:
    """Connect, send as much as the other side accepts, and close without reading."""
    with (
        contextlib.suppress(OSError),
        socket.create_connection(("127.0.0.1", port), timeout=5.0) as stranger,
    ):
        stranger.settimeout(1.0)
        stranger.sendall(data)


def _hostile_zmtp(dice: random.Random) -> bytes:
    noise = dice.randbytes(dice.randrange(1, 4096))
    huge = b"\x06" + struct.pack(">Q", 1 << dice.randrange(16, 63)) + noise
    return dice.choice(
        (
            noise,
            _ZMTP_GREETING,
            _ZMTP_GREETING + noise,
            _ZMTP_GREETING + huge,
            _ZMTP_GREETING[:20],
            b"",
        )
    )


def _hostile_http(dice: random.Random, key: str) -> bytes:
    noise = dice.randbytes(dice.randrange(1, 4096))
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n".encode()
    )
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x"}]}).encode()
    hurt = bytearray(body)
    hurt[dice.randrange(len(hurt))] = dice.randrange(256)
    length = f"Content-Length: {len(hurt)}\r\n\r\n".encode()
    return dice.choice(
        (
            noise,
            head,
            head + b"Content-Length: 99999999999\r\n\r\n" + noise,
            head + b"Content-Length: -1\r\n\r\n",
            head + b"Transfer-Encoding: chunked\r\n\r\nffffffff\r\n" + noise,
            head + length + bytes(hurt),
            head + length + bytes(hurt[: len(hurt) // 2]),
            head + b"Content-Length: 20000\r\n\r\n" + b"[" * 20000,
            head + b"X: " + b"a" * 70000 + b"\r\n\r\n",
            b"",
        )
    )
