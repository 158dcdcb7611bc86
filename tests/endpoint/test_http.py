"""Silent, slow and large clients: none of them takes what the rest of the process needs."""

import asyncio
import json
import os
import resource
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from byte_policy import BytePolicy
from clients import ASK, client_of

from vla_rl.endpoint import Endpoint, EndpointConfig
from vla_rl.endpoint.http import INLINE_BYTES, ConnectionListener, decode_body

SUPPORT = Path(__file__).parent / "support"


@asynccontextmanager
async def strangers(endpoint: Endpoint, num: int) -> AsyncIterator[list[asyncio.StreamReader]]:
    """Connections that say nothing, in the order in which they were made.

    They are closed at the end.
    """
    port = int(endpoint.base_url.split(":")[2].split("/")[0])
    pairs = [await asyncio.open_connection("127.0.0.1", port) for _ in range(num)]
    try:
        yield [reader for reader, _ in pairs]
    finally:
        for _, writer in pairs:
            writer.close()


@contextmanager
def few_descriptors(num_free: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + num_free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_two_hundred_silent_strangers_do_not_stop_spawn_nor_a_client() -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(SUPPORT / "crowded.py"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(SUPPORT), *sys.path])},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    writers = []
    try:
        async with asyncio.timeout(120):
            port = int(await process.stdout.readline())
            for _ in range(200):
                writers.append((await asyncio.open_connection("127.0.0.1", port))[1])
            process.stdin.write(b"\n")
            # half of what the process may still open
            assert int(await process.stdout.readline()) <= 60
            assert await process.stdout.readline() == b"hi\n"
            assert await process.wait() == 0
    finally:
        for writer in writers:
            writer.close()
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_a_silent_connection_is_closed_and_so_is_one_that_never_ends_its_headers() -> None:
    async with asyncio.timeout(60), Endpoint(EndpointConfig(idle_timeout_s=0.2)) as endpoint:
        port = int(endpoint.base_url.split(":")[2].split("/")[0])
        silent, first = await asyncio.open_connection("127.0.0.1", port)
        slow, second = await asyncio.open_connection("127.0.0.1", port)
        second.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: here\r\nX-Slow: ")
        assert await silent.read() == b""
        assert await slow.read() == b""
        for writer in (first, second):
            writer.close()


async def test_a_body_that_does_not_arrive_is_given_up() -> None:
    async with asyncio.timeout(60), Endpoint(EndpointConfig(body_timeout_s=0.2)) as endpoint:
        with endpoint.session(BytePolicy()) as session:
            port = int(endpoint.base_url.split(":")[2].split("/")[0])
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(
                b"POST /v1/chat/completions HTTP/1.1\r\nHost: here\r\nContent-Length: 99\r\n"
                b"Authorization: Bearer " + session.api_key.encode() + b'\r\n\r\n{"model'
            )
            answer = await reader.read()
            writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408 ")
    told = "the body did not arrive within body_timeout_s=0.2 s; 7 bytes of it did."
    assert json.loads(body)["error"]["message"] == told


async def test_a_body_of_unknown_length_is_cut_off_at_the_limit() -> None:
    async def endless() -> AsyncIterator[bytes]:
        for _ in range(64):
            yield b"x" * 1024

    async with asyncio.timeout(60), Endpoint(EndpointConfig(max_request_kb=4)) as endpoint:
        with endpoint.session(BytePolicy()) as session:
            headers = {"Authorization": f"Bearer {session.api_key}"}
            async with (
                aiohttp.ClientSession() as client,
                client.post(
                    f"{endpoint.base_url}/responses", data=endless(), headers=headers
                ) as response,
            ):
                assert response.status == 413


async def test_the_oldest_stranger_gives_way_to_a_client() -> None:
    async with asyncio.timeout(60), Endpoint(EndpointConfig(max_connections=3)) as endpoint:
        with endpoint.session(BytePolicy("hi")) as session:
            async with strangers(endpoint, 3) as silent, client_of(session) as client:
                answer = await client.chat.completions.create(model="m", messages=ASK)
                assert answer.choices[0].message.content == "hi"
                assert await silent[0].read() == b""
                assert not silent[1].at_eof()


async def test_clients_wait_for_each_other_where_there_is_no_room() -> None:
    policy = BytePolicy("one", "two")
    policy.is_stuck = True
    async with asyncio.timeout(60), Endpoint(EndpointConfig(max_connections=1)) as endpoint:
        with endpoint.session(policy) as session:
            async with client_of(session) as first, client_of(session) as second:
                stuck = asyncio.create_task(first.chat.completions.create(model="m", messages=ASK))
                await policy.asked.wait()
                policy.is_stuck = False
                waiting = asyncio.create_task(
                    second.chat.completions.create(model="m", messages=ASK)
                )
                stuck.cancel()
                await policy.given_up.wait()
                assert (await waiting).choices[0].message.content == "one"


async def test_a_connection_is_not_kept_open_where_half_of_the_room_is_taken() -> None:
    async with asyncio.timeout(60), Endpoint(EndpointConfig(max_connections=4)) as endpoint:
        with endpoint.session(BytePolicy("hi", "hi")) as session:
            async with aiohttp.ClientSession(
                headers={"Authorization": f"Bearer {session.api_key}"}
            ) as client:

                async def connection() -> str | None:
                    body = {"model": "m", "messages": ASK}
                    async with client.post(
                        f"{endpoint.base_url}/chat/completions", json=body
                    ) as response:
                        return response.headers.get("Connection")

                assert await connection() is None
                async with strangers(endpoint, 2):
                    while endpoint.num_connections < 3:  # noqa: ASYNC110  # nothing says when the kernel hands them over
                        await asyncio.sleep(0)
                    assert await connection() == "close"


async def test_connections_are_lowered_to_half_of_the_free_descriptors_and_one_line_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    listener = ConnectionListener(asyncio.Protocol, max_connections=100)
    with few_descriptors(41):
        await listener.bind("127.0.0.1", 0)
        listener.stop_listening()
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(
        "the endpoint accepts 20 connections instead of max_connections=100, because the process "
        "may open only 4"
    )


async def test_a_large_body_is_decoded_beside_the_loop() -> None:
    def decode(body: bytes) -> int:
        return threading.get_ident()

    assert await decode_body(b"x" * INLINE_BYTES, decode) == threading.get_ident()
    assert await decode_body(b"x" * (INLINE_BYTES + 1), decode) != threading.get_ident()


async def test_a_large_conversation_is_answered() -> None:
    messages: Any = [{"role": "user", "content": "word " * 100}] * 1000
    policy = BytePolicy("hi", context_size=1 << 20)
    async with asyncio.timeout(60), Endpoint() as endpoint:
        with endpoint.session(policy) as session:
            async with client_of(session) as client:
                await client.chat.completions.create(model="m", messages=messages)
    assert len(policy.requests[0][0]) == 1000
