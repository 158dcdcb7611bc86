"""A rank's share of the weights to one host, on an encrypted connection between the two.

    rank: its first pieces ──► host: one question for each piece that has its place ──► rank: the next

The rank connects, because hosts have ports that others may reach and the machine of the control process
may have none. The pieces that no question came for bound what is on the way.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Final

import zmq

from vla_rl.actors.codec import Codec
from vla_rl.actors.completion import run_to_its_end
from vla_rl.actors.direct_link import DirectLink
from vla_rl.actors.placement import KeyPair
from vla_rl.actors.remote_channel import LINK_WITHIN_S
from vla_rl.actors.wire import Frames, Kind
from vla_rl.engines.weight_shards import SHARD_PIECES_AHEAD, ShardPiece, ShardSocket
from vla_rl.errors import HostNotReached, WeightsNotGiven

_LOOK_EVERY_S: Final = 0.5


class ShareGiver:
    """Sends one share.

    Args:
        keys: those whose public one the host was given.
        door: place at which the host takes it.
        next_piece: returns the next piece; None after the last one.
    """

    def __init__(
        self,
        keys: KeyPair,
        door: ShardSocket,
        next_piece: Callable[[], Awaitable[ShardPiece | None]],
    ) -> None:
        self._keys, self._door, self._next_piece = keys, door, next_piece
        self._codec = Codec()
        # a question, or None at the end of the connection; bounded by the pieces on their way
        self._news: asyncio.Queue[Frames | None] = asyncio.Queue()

    async def give(self) -> None:
        """Send all pieces, and wait until the host has closed its door.

        Raises: HostNotReached; WeightsNotGiven if the connection is lost before; what `next_piece`
            raises.
        """
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        put = self._news.put_nowait
        address, key = self._door.address, self._door.public_key
        try:
            link = DirectLink(context, address, key, self._keys, put, lambda: put(None))
        except ConnectionError as error:
            context.term()
            raise HostNotReached(f"its door cannot be used: {error}") from error
        try:
            await self._send_all(link)
        finally:
            link.close()
            await run_to_its_end(context.term)  # it waits for what is half sent

    async def _send_all(self, link: DirectLink) -> None:
        room, piece = SHARD_PIECES_AHEAD, await self._next_piece()
        began_s = time.monotonic()
        while True:
            while piece is not None and room > 0:
                link.send(self._codec.encode(Kind.RESULT, 0, 0, 0, piece, "weights"))
                room -= 1
                piece = await self._next_piece()
            try:
                async with asyncio.timeout(_LOOK_EVERY_S):
                    question = await self._news.get()
            except TimeoutError:
                if not link.is_up and time.monotonic() - began_s > LINK_WITHIN_S:
                    raise HostNotReached(
                        f"{link.address} does not answer within {LINK_WITHIN_S:g} s"
                    ) from None
                continue
            if question is not None:
                room += 1
            elif piece is None and link.is_up:
                return
            elif link.is_up:
                raise WeightsNotGiven(f"the connection to {link.address} was lost")
            else:
                raise HostNotReached(f"{link.address} refuses the connection")
