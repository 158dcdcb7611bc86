"""Images as one row of bytes: in memory that other processes open by path, and from host to host.

    cache: ImageRequest(key) ──► source: the arrays of that episode's observations, as one row of bytes ──► cache
    cache: with spans ──► another cache: those bytes of the row that it has ──► cache

Each is a call of an actor whose handle the cache was sent.

One row, because each array in a frame of its own takes twice the time of the bytes alone.
"""

import asyncio
import os
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, Final, Protocol, TypeVar

import msgspec
import numpy as np

from vla_rl.actors import Actor, actor_method, close_handle
from vla_rl.errors import ActorDied
from vla_rl.types.observation import KEY_BYTES


class ImageMemory:
    """Rows of bytes, end to end, behind a key; a kill leaves nothing behind.

    Args:
        key: whose images they are.
        rows: uint8 [bytes] each.

    Attributes:
        path: opens it, for processes of the same user.
        num_bytes: without the key.
    """

    def __init__(self, key: int, rows: Sequence[np.ndarray]) -> None:
        # A file without a name: the kernel frees it with the last process that has it open, whatever ends
        # that process.
        self._descriptor = os.memfd_create("vla_rl_images", os.MFD_CLOEXEC)
        self.path = f"/proc/{os.getpid()}/fd/{self._descriptor}"
        self.num_bytes = sum(row.nbytes for row in rows)
        try:
            self._write(memoryview(key.to_bytes(KEY_BYTES, "little")))
            for row in rows:
                self._write(row.data)
        except BaseException:
            self.close()
            raise

    def read_spans(self, spans: Sequence[tuple[int, int]]) -> np.ndarray:
        """Return spans of bytes, end to end; they count from the beginning of the memory.

        Raises: ValueError for a span outside of it.
        """
        size = KEY_BYTES + self.num_bytes
        # another process has named them, and `pread` takes the memory before it reads
        if outside := [each for each in spans if not 0 <= each[0] <= each[1] <= size]:
            raise ValueError(f"bytes {outside[0]} are wanted, expected some of 0 to {size}")
        found = [os.pread(self._descriptor, end - begin, begin) for begin, end in spans]
        return np.frombuffer(b"".join(found), np.uint8)

    def close(self) -> None:
        """Free it; processes that have opened it still read it."""
        os.close(self._descriptor)

    def _write(self, rest: memoryview) -> None:
        while len(rest):
            rest = rest[os.write(self._descriptor, rest) :]


T = TypeVar("T")

SILENT_S: Final = 30.0
"""Silence after which a sender that was asked counts as lost. Its death is noticed sooner: its
connection closes, or the control process misses its host."""

EPISODES_AHEAD: Final = 4
"""Episodes that an image cache asks one sender for before one has come; this bounds what is on the way."""


class ImageRequest(msgspec.Struct, frozen=True):
    """A request for the observations of one episode."""

    key: int
    spans: tuple[tuple[int, int], ...] = ()
    """First and last byte, excluded, of the parts of a row in an image cache; none for all arrays."""


class ArrayLayout(msgspec.Struct, frozen=True, array_like=True):
    """The position of an array in a row of bytes."""

    path: str
    """Its path in the trajectory, as in an episode store."""

    start: int
    dtype: str
    shape: tuple[int, ...]


class ImageReply(msgspec.Struct, frozen=True):
    """Large arrays of an episode's observations, end to end."""

    data: np.ndarray
    """uint8 [bytes]."""

    layout: tuple[ArrayLayout, ...] = ()
    """Their positions; empty for spans, which the image cache knows."""


class ImageSource(Actor):
    """Gives image caches what its process has, each over a handle of its own.

    It is in the loop of the process that makes the images, beside what it does else.

    Args:
        find: returns what is wanted; None if it is gone. `Callable[[ImageRequest], ImageReply | None]`.
    """

    def __init__(self, find: Any) -> None:
        self._find = find

    @actor_method(concurrent=True)
    async def read_images(self, wanted: ImageRequest) -> ImageReply | None:
        """Return observations of an episode; None if they are not here."""
        reply: ImageReply | None = self._find(wanted)
        return reply

    @actor_method(concurrent=True)
    async def ping(self) -> None:
        """Return at once, so that a call tells whether there is a connection."""


class ImagesMissing(Exception):
    """The source does not have the arrays of this episode."""


class CanReadImages(Protocol):
    """An image source or an image cache: both are read in the same way."""

    async def read_images(self, wanted: ImageRequest) -> ImageReply | None:
        """Return observations of an episode; None if they are not there."""
        ...

    async def ping(self) -> None:
        """Return at once."""
        ...


class ImageReceiver:
    """Reads from one source, some episodes ahead. Owned by one event loop.

    Args:
        source: handle that was received.
    """

    def __init__(self, source: CanReadImages) -> None:
        self._source, self._fault = source, ""
        self._ahead = asyncio.Semaphore(EPISODES_AHEAD)
        self._clock, self._received_s = asyncio.get_running_loop().time, 0.0

    async def connect(self) -> None:
        """Wait for the connection. Raises: ConnectionError."""
        await self._ask(self._source.ping())

    async def request_images(self, wanted: ImageRequest) -> ImageReply:
        """Return observations of an episode.

        Raises: ConnectionError if the source is lost; ImagesMissing if it does not have them.
        """
        async with self._ahead:
            if self._fault:
                raise ConnectionError(self._fault)
            reply = await self._ask(self._source.read_images(wanted))
        if reply is None:
            raise ImagesMissing
        return reply

    def close(self) -> None:
        """Close the connection; what was asked for fails."""
        close_handle(self._source)

    # waits for: an answer of the source          woken by: the answer; ActorDied, once the connection or the
    #                                             actor has ended; the clock, after SILENT_S without any answer
    async def _ask(self, call: Coroutine[Any, Any, T]) -> T:
        asking, started_s = asyncio.ensure_future(call), self._clock()
        try:
            while not asking.done():
                # what came meanwhile was asked for before: the source is slow, and not silent
                left_s = max(started_s, self._received_s) + SILENT_S - self._clock()
                if left_s <= 0:
                    self._fault = f"the source was silent for {SILENT_S:g} s"
                    self.close()
                    raise ConnectionError(self._fault)
                await asyncio.wait((asking,), timeout=left_s)
            self._received_s = self._clock()
            return asking.result()
        except ActorDied as death:
            raise ConnectionError(death.cause) from death
        finally:
            asking.cancel()


def join_arrays(arrays: Mapping[str, np.ndarray]) -> ImageReply:
    """Join arrays end to end."""
    layout, rows, start = [], [np.empty(0, np.uint8)], 0
    for path, array in arrays.items():
        layout.append(ArrayLayout(path, start, array.dtype.str, array.shape))
        rows.append(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
        start += array.nbytes
    return ImageReply(np.concatenate(rows), tuple(layout))
