"""Bodies of requests: limited in size and time, and decoded in a thread if they are large."""

import asyncio
from collections.abc import Callable
from typing import Final, TypeVar

from aiohttp import web

from vla_rl.endpoint.errors import RequestError

INLINE_BYTES: Final = 1 << 16
"""Most bytes of a body that is decoded in the event loop, in a fraction of a millisecond; larger
ones take a thread."""

T = TypeVar("T")


async def read_body(request: web.BaseRequest, max_bytes: int, timeout_s: float) -> bytes:
    """Return the whole body.

    Raises: RequestError if it is too large, does not arrive in time, or is not encoded as its
    headers say.
    """
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
            f"the body did not arrive within body_timeout_s={timeout_s:g} s; {len(body)} bytes of "
            "it did.",
            status=408,
        ) from error
    except web.RequestPayloadError as error:
        encoding = request.headers.get("Content-Encoding", "identity")
        raise RequestError(
            f"the body is not what its headers say (Content-Encoding: {encoding[:40]}): "
            f"{type(error.__cause__ or error).__name__}; expected JSON, plain or compressed so."
        ) from error
    return bytes(body)


async def decoded(body: bytes, decode: Callable[[bytes], T]) -> T:
    """Return `decode(body)`, computed in a thread if the body is large."""
    return decode(body) if len(body) <= INLINE_BYTES else await asyncio.to_thread(decode, body)


def _too_large(max_bytes: int) -> RequestError:
    return RequestError(
        f"the request is larger than max_request_kb={max_bytes // 1024} KiB.", status=413
    )
