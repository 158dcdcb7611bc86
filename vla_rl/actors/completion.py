"""Work that is waited for to its end, also by a caller that is being cancelled."""

import asyncio
from typing import TypeVar

T = TypeVar("T")


async def to_its_end(work: asyncio.Future[T]) -> T:
    """The result of `work`. A cancellation of the caller is let through only once that is done."""
    cancelled: asyncio.CancelledError | None = None
    while not work.done():
        try:
            await asyncio.wait([work])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        work.exception()  # the caller is leaving and cannot use it
        raise cancelled
    return work.result()
