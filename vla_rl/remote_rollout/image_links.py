"""Images as one row of bytes: in memory that other processes open by path, and from host to host.

    cache: ImageRequest(key) ──► sender: the arrays of that episode's observations, as one row of bytes ──► cache
    cache: with spans ──► another cache: those bytes of the row that it has ──► cache

One row, because each array in a frame of its own takes twice the time of the bytes alone.
"""

import asyncio
import logging
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Final

import msgspec
import numpy as np

from vla_rl.actors.placement import KeyPair
from vla_rl.actors.remote.host_connection import LINK_WITHIN_S
from vla_rl.actors.remote.peer_sockets import ServerSocket, SocketAddress, open_link
from vla_rl.actors.wire.codec import Codec
from vla_rl.actors.wire.envelope import Frames, Kind, MalformedMessage, unpack_envelope
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


logger = logging.getLogger(__name__)

SILENT_S: Final = 30.0
"""Silence after which a sender that was asked counts as lost. Its death is noticed sooner: its
connection closes, or the control process misses its host."""

EPISODES_AHEAD: Final = 4
"""Episodes that an image cache asks one sender for before one has come; this bounds what is on the way."""


class ImageRequest(msgspec.Struct, frozen=True):
    """A request for the observations of one episode; without a key, for a sign of life."""

    key: int | None
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


NO_IMAGES: Final = ImageReply(np.empty(0, np.uint8))


class ImagesMissing(Exception):
    """The sender does not have the arrays of this episode."""


class ImageSender:
    """Gives one image cache what the episode store of this host has, or another image cache.

    Args:
        shelf_key: public key of the only image cache that may connect.
        find: returns what is wanted, which has a key; None if it is gone.

    Raises: OSError if no port is free.
    """

    def __init__(self, cache_key: str, find: Callable[[ImageRequest], ImageReply | None]) -> None:
        self._find, self._codec = find, Codec()
        self._open = ServerSocket(cache_key, self._on_message)
        self.address = self._open.address
        """Place at which the image cache connects."""

    def close(self) -> None:
        """Close the connection."""
        self._open.close()

    def _on_message(self, frames: Frames) -> None:
        found: ImageReply | None = None
        try:
            wanted = self._codec.decode(self._codec.get_decoder(ImageRequest), frames)
            found = NO_IMAGES if wanted.key is None else self._find(wanted)
        except (ValueError, OSError, msgspec.ValidationError) as error:
            # answered all the same: answers are told apart by their order
            logger.warning(
                "an image cache asked for images in a message that cannot be read: %s", error
            )
        kind = Kind.ERROR if found is None else Kind.RESULT
        self._open.send_frames(self._codec.encode(kind, 0, 0, 0, found, "images"))


class ImageReceiver:
    """An image cache's connection to one sender. Owned by one event loop.

    Args:
        keys: those whose public one the sender was given.
        host: address of the sender's host, without a port.
        socket: its address there.
    """

    def __init__(self, keys: KeyPair, host: str, socket: SocketAddress) -> None:
        self._codec, self._stack = Codec(), ExitStack()
        self._asked: deque[asyncio.Future[ImageReply]] = deque()
        self._room, self._fault = asyncio.Semaphore(EPISODES_AHEAD), ""
        self._clock, self._received_s = asyncio.get_running_loop().time, 0.0
        self._link = self._stack.enter_context(
            open_link(host, socket, keys, self._on_message, self._on_lost)
        )

    async def connect(self) -> None:
        """Wait for the connection. Raises: ConnectionError."""
        await self._ask(ImageRequest(None), LINK_WITHIN_S)

    async def request_images(self, wanted: ImageRequest) -> ImageReply:
        """Ask for observations of an episode.

        Raises: ConnectionError if the sender is lost; ImagesMissing if it does not have them.
        """
        async with self._room:
            return await self._ask(wanted, SILENT_S)

    def close(self) -> None:
        """Close the connection; what was asked for fails."""
        self._fail("the connection was closed")
        self._stack.close()

    async def _ask(self, wanted: ImageRequest, within_s: float) -> ImageReply:
        if self._fault:
            raise ConnectionError(self._fault)
        answer: asyncio.Future[ImageReply] = asyncio.get_running_loop().create_future()
        self._asked.append(answer)
        self._link.send_frames(self._codec.encode(Kind.CALL, 0, 0, 0, wanted, "images"))
        started_s = self._clock()
        while True:
            # what came meanwhile was asked for before: the sender is slow, and not silent
            until_s = max(started_s, self._received_s) + within_s
            try:
                async with asyncio.timeout_at(until_s):
                    # shielded: answers come in the order of the questions, also of those given up
                    return await asyncio.shield(answer)
            except TimeoutError:
                if self._received_s + within_s <= until_s:
                    self._fail(f"{self._link.address} does not answer within {within_s:g} s")
                    raise ConnectionError(self._fault) from None

    def _on_message(self, frames: Frames) -> None:
        self._received_s = self._clock()
        if not self._asked:
            return
        answer = self._asked.popleft()
        if answer.done():
            return
        try:
            if unpack_envelope(frames[0])[0] == Kind.ERROR:
                _fail_future(answer, ImagesMissing())
            else:
                answer.set_result(self._codec.decode(self._codec.get_decoder(ImageReply), frames))
        except (MalformedMessage, msgspec.ValidationError) as error:
            _fail_future(answer, ConnectionError(f"{self._link.address} sends no images: {error}"))

    def _on_lost(self) -> None:
        self._fail(f"the connection to {self._link.address} was lost")

    def _fail(self, fault: str) -> None:
        self._fault = self._fault or fault
        while self._asked:
            answer = self._asked.popleft()
            if not answer.done():
                _fail_future(answer, ConnectionError(self._fault))


def _fail_future(answer: "asyncio.Future[ImageReply]", error: Exception) -> None:
    answer.set_exception(error)
    answer.exception()  # one that nobody awaits any more must not be reported as forgotten


def join_arrays(arrays: Mapping[str, np.ndarray]) -> ImageReply:
    """Join arrays end to end."""
    layout, rows, start = [], [np.empty(0, np.uint8)], 0
    for path, array in arrays.items():
        layout.append(ArrayLayout(path, start, array.dtype.str, array.shape))
        rows.append(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
        start += array.nbytes
    return ImageReply(np.concatenate(rows), tuple(layout))
