"""Pictures from the host that made them to a shelf, on an encrypted connection between the two.

    shelf: WantedPictures(key) ──► giver: the arrays of that episode's observations, as one row of bytes ──► shelf
    shelf: with spans ──► another shelf: those bytes of the row that it has ──► shelf

One row, because each array in a frame of its own takes twice the time of the bytes alone.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Final

import msgspec
import numpy as np

from vla_rl.actors.codec import Codec
from vla_rl.actors.placement import KeyPair
from vla_rl.actors.remote_channel import LINK_WITHIN_S
from vla_rl.actors.wire import Frames, Kind, MalformedMessage, unpack_envelope
from vla_rl.remote_rollout.doors import OpenDoor, linked
from vla_rl.remote_rollout.messages import Door

logger = logging.getLogger(__name__)

SILENT_S: Final = 30.0
"""Silence after which a giver that was asked counts as lost. Its death is noticed sooner: its
connection closes, or the control process misses its host."""

AHEAD: Final = 4
"""Episodes that a shelf asks one giver for before one has come; this bounds what is on the way."""


class WantedPictures(msgspec.Struct, frozen=True):
    """A request for the observations of one episode; without a key, for a sign of life."""

    key: int | None
    spans: tuple[tuple[int, int], ...] = ()
    """First and last byte, excluded, of the parts of a row on a shelf; none for all arrays."""


class PlacedArray(msgspec.Struct, frozen=True, array_like=True):
    """The position of an array in a row of bytes."""

    place: str
    """Its place in the trajectory, as in a depot."""

    start: int
    dtype: str
    shape: tuple[int, ...]


class GivenPictures(msgspec.Struct, frozen=True):
    """Large arrays of an episode's observations, end to end."""

    data: np.ndarray
    """uint8 [bytes]."""

    layout: tuple[PlacedArray, ...] = ()
    """Their positions; empty for spans, which the shelf knows."""


NOTHING: Final = GivenPictures(np.empty(0, np.uint8))


class PicturesMissing(Exception):
    """The giver does not have the arrays of this episode."""


class PictureGiver:
    """Gives one shelf what the depot of this host has, or another shelf.

    Args:
        shelf_key: public key of the only shelf that may connect.
        find: returns what is wanted, which has a key; None if it is gone.

    Raises: OSError if no port is free.
    """

    def __init__(
        self, shelf_key: str, find: Callable[[WantedPictures], GivenPictures | None]
    ) -> None:
        self._find, self._codec = find, Codec()
        self._open = OpenDoor(shelf_key, self._on_message)
        self.door = self._open.door
        """Place at which the shelf connects."""

    def close(self) -> None:
        """Close the connection."""
        self._open.close()

    def _on_message(self, frames: Frames) -> None:
        found: GivenPictures | None = None
        try:
            wanted = self._codec.decode(self._codec.decoder(WantedPictures), frames)
            found = NOTHING if wanted.key is None else self._find(wanted)
        except (ValueError, OSError, msgspec.ValidationError) as error:
            # answered all the same: answers are told apart by their order
            logger.warning("a shelf asked for pictures in a message that cannot be read: %s", error)
        kind = Kind.ERROR if found is None else Kind.RESULT
        self._open.send(self._codec.encode(kind, 0, 0, 0, found, "pictures"))


class PictureTaker:
    """A shelf's connection to one giver. Owned by one event loop.

    Args:
        keys: those whose public one the giver was given.
        host: address of the giver's host, without a port.
        door: its place there.
    """

    def __init__(self, keys: KeyPair, host: str, door: Door) -> None:
        self._codec, self._stack = Codec(), ExitStack()
        self._asked: deque[asyncio.Future[GivenPictures]] = deque()
        self._room, self._fault = asyncio.Semaphore(AHEAD), ""
        self._clock, self._heard_s = asyncio.get_running_loop().time, 0.0
        self._link = self._stack.enter_context(
            linked(host, door, keys, self._on_message, self._on_lost)
        )

    async def connect(self) -> None:
        """Wait for the connection. Raises: ConnectionError."""
        await self._ask(WantedPictures(None), LINK_WITHIN_S)

    async def take(self, wanted: WantedPictures) -> GivenPictures:
        """Ask for observations of an episode.

        Raises: ConnectionError if the giver is lost; PicturesMissing if it does not have them.
        """
        async with self._room:
            return await self._ask(wanted, SILENT_S)

    def close(self) -> None:
        """Close the connection; what was asked for fails."""
        self._fail("the connection was closed")
        self._stack.close()

    async def _ask(self, wanted: WantedPictures, within_s: float) -> GivenPictures:
        if self._fault:
            raise ConnectionError(self._fault)
        answer: asyncio.Future[GivenPictures] = asyncio.get_running_loop().create_future()
        self._asked.append(answer)
        self._link.send(self._codec.encode(Kind.CALL, 0, 0, 0, wanted, "pictures"))
        begun_s = self._clock()
        while True:
            # what came meanwhile was asked for before: the giver is slow, and not silent
            until_s = max(begun_s, self._heard_s) + within_s
            try:
                async with asyncio.timeout_at(until_s):
                    # shielded: answers come in the order of the questions, also of those given up
                    return await asyncio.shield(answer)
            except TimeoutError:
                if self._heard_s + within_s <= until_s:
                    self._fail(f"{self._link.address} does not answer within {within_s:g} s")
                    raise ConnectionError(self._fault) from None

    def _on_message(self, frames: Frames) -> None:
        self._heard_s = self._clock()
        if not self._asked:
            return
        answer = self._asked.popleft()
        if answer.done():
            return
        try:
            if unpack_envelope(frames[0])[0] == Kind.ERROR:
                _raise_in(answer, PicturesMissing())
            else:
                answer.set_result(self._codec.decode(self._codec.decoder(GivenPictures), frames))
        except (MalformedMessage, msgspec.ValidationError) as error:
            _raise_in(answer, ConnectionError(f"{self._link.address} sends no pictures: {error}"))

    def _on_lost(self) -> None:
        self._fail(f"the connection to {self._link.address} was lost")

    def _fail(self, fault: str) -> None:
        self._fault = self._fault or fault
        while self._asked:
            answer = self._asked.popleft()
            if not answer.done():
                _raise_in(answer, ConnectionError(self._fault))


def _raise_in(answer: "asyncio.Future[GivenPictures]", error: Exception) -> None:
    answer.set_exception(error)
    answer.exception()  # one that nobody awaits any more must not be reported as forgotten


def in_a_row(arrays: Mapping[str, np.ndarray]) -> GivenPictures:
    """Join arrays end to end."""
    layout, rows, start = [], [np.empty(0, np.uint8)], 0
    for place, array in arrays.items():
        layout.append(PlacedArray(place, start, array.dtype.str, array.shape))
        rows.append(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
        start += array.nbytes
    return GivenPictures(np.concatenate(rows), tuple(layout))
