"""Weights from one host to the next, on an encrypted connection between the two (`doors`).

    taker: Wanted(start) ──► giver: the bytes, as soon as it has them ──► taker

A giver passes bytes on while they come in. The taker asks for a few pieces ahead, which bounds what
is on the way.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Final

import msgspec
import numpy as np

from vla_rl.actors.codec import Codec
from vla_rl.actors.direct_link import DirectLink
from vla_rl.actors.placement import KeyPair
from vla_rl.actors.remote_channel import LINK_WITHIN_S
from vla_rl.actors.wire import Frames, Kind, MalformedMessage, unpack_envelope
from vla_rl.remote_rollout.doors import OpenDoor, linked
from vla_rl.remote_rollout.flat_weights import IncomingWeights
from vla_rl.remote_rollout.messages import WEIGHT_PIECE_BYTES, Door, Taken

SILENT_S: Final = 30.0
"""Silence after which a neighbour counts as lost. Its death is noticed sooner: its connection closes,
or the control process misses it."""

_AHEAD: Final = 8
"""Pieces that are asked for before one has come: enough to fill a cable whose ends are woken late, as
on a busy machine."""

_LOOK_EVERY_S: Final = 0.5


class Wanted(msgspec.Struct, frozen=True):
    """A request for the bytes of a version from one place on."""

    member: str
    version: int
    start: int
    num_bytes: int


class WeightGiver:
    """Gives one neighbour what this host has of a policy's weights, or gets meanwhile.

    Args:
        taker_key: public key of the only neighbour that may connect.
        row_of: returns the weights of a member; None if it has none.
    """

    def __init__(self, taker_key: str, row_of: Callable[[str], IncomingWeights | None]) -> None:
        self._row_of, self._codec = row_of, Codec()
        self._wanted: list[Wanted] = []
        self._open = OpenDoor(taker_key, self._on_message)
        self.door = self._open.door
        """Place at which the neighbour connects."""

    def give(self) -> None:
        """Send what is wanted and has come by now."""
        waiting: list[Wanted] = []
        for wanted in self._wanted:
            row = self._row_of(wanted.member)
            if row is None or row.heading.version != wanted.version:
                self._send(Kind.ERROR, f"it has no version {wanted.version} of {wanted.member!r}")
            elif row.num_received < min(wanted.start + wanted.num_bytes, row.heading.num_bytes):
                waiting.append(wanted)
            else:
                self._send(Kind.RESULT, row.piece(wanted.start, wanted.num_bytes))
        self._wanted = waiting

    def close(self) -> None:
        """Close the connection."""
        self._open.close()

    def _on_message(self, frames: Frames) -> None:
        try:
            wanted = self._codec.decode(self._codec.decoder(Wanted), frames)
        except (MalformedMessage, msgspec.ValidationError):
            return
        self._wanted.append(wanted)
        self.give()

    def _send(self, kind: Kind, value: np.ndarray | str) -> None:
        self._open.send(self._codec.encode(kind, 0, 0, 0, value, "weights"))


class WeightTaker:
    """Takes the rest of a version from a neighbour.

    Args:
        keys: those whose public one the neighbour was given.
        incoming: the version; its bytes may come from elsewhere before and afterwards.
        came: called after each piece.
    """

    def __init__(self, keys: KeyPair, incoming: IncomingWeights, came: Callable[[], None]) -> None:
        self._keys, self._incoming, self._came = keys, incoming, came
        self._codec = Codec()
        self._news: asyncio.Queue[Frames | None] = asyncio.Queue()  # bounded by what is asked for

    async def take(self, host: str, door: Door) -> Taken:
        """Take all that is missing; return how far it came if the neighbour is lost meanwhile.

        Args:
            host: address of the neighbour's host, without a port.
            door: its place there.

        Raises: CheckpointError for bytes that do not fit.
        """
        put = self._news.put_nowait
        try:
            with linked(host, door, self._keys, put, lambda: put(None)) as link:
                fault, is_unreachable = await self._take_all(link)
        except ConnectionError as error:
            fault, is_unreachable = f"its door cannot be used: {error}", True
        return Taken(
            num_bytes=self._incoming.num_received, fault=fault, is_unreachable=is_unreachable
        )

    async def _take_all(self, link: DirectLink) -> tuple[str, bool]:
        """Return what is wrong with the neighbour, and whether it was never reached."""
        incoming, total = self._incoming, self._incoming.heading.num_bytes
        asked, heard_s = self._ask_ahead(link, incoming.num_received), time.monotonic()
        began_s = heard_s
        while incoming.num_received < total:
            try:
                async with asyncio.timeout(_LOOK_EVERY_S):
                    frames = await self._news.get()
            except TimeoutError:
                now = time.monotonic()
                if not link.is_up and now - began_s > LINK_WITHIN_S:
                    return f"{link.address} does not answer within {LINK_WITHIN_S:g} s", True
                if now - heard_s > SILENT_S:
                    return f"{link.address} was silent for {SILENT_S:g} s", False
                continue
            if frames is None:
                return f"the connection to {link.address} was lost", not link.is_up
            heard_s = time.monotonic()
            try:
                if unpack_envelope(frames[0])[0] == Kind.ERROR:
                    return str(self._codec.decode(self._codec.decoder(str), frames)), False
                piece = self._codec.decode(self._codec.decoder(np.ndarray), frames)
            except (MalformedMessage, msgspec.ValidationError) as error:
                return f"{link.address} sent something else than weights: {error}", False
            incoming.put(incoming.num_received, piece)
            asked = self._ask_ahead(link, asked)
            self._came()
            await incoming.read_on()
        return "", False

    def _ask_ahead(self, link: DirectLink, asked: int) -> int:
        """Ask for what may be on the way; return the place up to which all was asked for."""
        incoming = self._incoming
        most = min(incoming.num_received + _AHEAD * WEIGHT_PIECE_BYTES, incoming.heading.num_bytes)
        while asked < most:
            self._ask(link, asked)
            asked += WEIGHT_PIECE_BYTES
        return asked

    def _ask(self, link: DirectLink, start: int) -> None:
        heading = self._incoming.heading
        wanted = Wanted(heading.member, heading.version, start, WEIGHT_PIECE_BYTES)
        link.send(self._codec.encode(Kind.CALL, 0, 0, 0, wanted, "wanted weights"))
