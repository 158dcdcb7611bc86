"""Bodies of requests: limited in size and time, and read beside the event loop if they are large."""

import asyncio
from collections.abc import Callable
from typing import Final, TypeVar

from aiohttp import web

from vla_rl.endpoint.errors import RequestError

INLINE_BYTES: Final = 1 << 16
"""Decoding a body of this size takes a fraction of a millisecond; a larger one is decoded in a thread."""

T = TypeVar("T")


async def read_body(request: web.BaseRequest, max_bytes: int, timeout_s: float) -> bytes:
    """The whole body. Raises: RequestError for one that is too large, or does not arrive in time."""
    if request.content_length is not None and request.content_length > max_bytes:
        raise _too_large(max_bytes)
    body = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            async for part in request.content.iter_any():
                body += part
                if len(body) > max_bytes:
                    raise _too_large(max_bytes)
    except TimeoutError as error:
        raise RequestError(
            f"the body did not arrive within body_timeout_s={timeout_s:g} s; {len(body)} bytes of it did.", status=408
        ) from error
    return bytes(body)


async def decoded(body: bytes, decode: Callable[[bytes], T]) -> T:
    """`decode(body)`, in a thread if the body is large."""
    return decode(body) if len(body) <= INLINE_BYTES else await asyncio.to_thread(decode, body)


def _too_large(max_bytes: int) -> RequestError:
    return RequestError(f"the request is larger than max_request_kb={max_bytes // 1024} KiB.", status=413)
