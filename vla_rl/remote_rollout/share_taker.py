"""A version of the weights from the learner's ranks, each of which gives its share by a link of its own.

    keys of the ranks ──► a door for each ──► the ranks connect
    rank: a piece ──► its place in the row; its digest ──► a question for the next one

The beginning of the row is whole as far as the rank that is furthest behind has come: that much is
passed on to a neighbour.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Final

import msgspec

from vla_rl.actors.codec import Codec
from vla_rl.actors.completion import run_to_its_end
from vla_rl.actors.wire import Frames, Kind, MalformedMessage
from vla_rl.engines.weight_shares import ShareDigest, SharePiece, WeightShare
from vla_rl.errors import CheckpointError, WeightsNotGiven
from vla_rl.remote_rollout.doors import Entrance, OpenDoor
from vla_rl.remote_rollout.flat_weights import IncomingWeights
from vla_rl.remote_rollout.messages import Door

SILENT_S: Final = 30.0
"""Silence after which a rank counts as lost. Its death is noticed sooner, by the control process."""

_MOST_THREADS: Final = 4


class ShareTaker:
    """Takes all shares of a version, at the same time.

    Args:
        keys: public keys of the ranks; one door is opened for each.
        incoming: the version.
        came: called when the beginning of the row has become longer.

    Raises: OSError if no port is free.
    """

    def __init__(
        self, keys: Sequence[str], incoming: IncomingWeights, came: Callable[[], None]
    ) -> None:
        self._incoming, self._came = incoming, came
        self._open = ExitStack()
        entrance = Entrance(min(max(len(keys), 1), _MOST_THREADS))
        self._open.callback(entrance.close)
        self._links: list[_ShareLink] = []
        try:
            for key in keys:
                link = _ShareLink(key, entrance)
                self._open.callback(link.close)
                self._links.append(link)
        except BaseException:
            self._open.close()
            raise
        entrance.gatekeeper.allow(keys)

    @property
    def doors(self) -> list[Door]:
        """Places at which the ranks connect, in the order of their keys."""
        return [link.door for link in self._links]

    async def take(self, shares: Sequence[WeightShare]) -> str:
        """Take the shares, in the order of the keys; return the digest of the row.

        Raises: CheckpointError for other bytes than the ranks have; WeightsNotGiven if one is silent.
        """
        try:
            async with asyncio.TaskGroup() as group:
                for link, share in zip(self._links, shares, strict=True):
                    group.create_task(self._take_share(link, share))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            self.close()
        return await self._incoming.accept(sum(share.num_bytes for share in shares))

    def close(self) -> None:
        """Close all doors and connections."""
        self._open.close()

    async def _take_share(self, link: "_ShareLink", share: WeightShare) -> None:
        total = self._incoming.heading.num_bytes
        digest = ShareDigest()
        while link.next_at < total:
            piece = await link.next_piece(share.holder)
            # copied and read in a thread: other ranks' pieces, and episodes, come meanwhile
            await run_to_its_end(self._put, piece, digest)
            link.next_at = piece.next_at
            link.ask()
            self._incoming.advance(min(each.next_at for each in self._links))
            self._came()
            await self._incoming.read_on()
        if (digest.digest, digest.num_bytes) != (share.digest, share.num_bytes):
            raise CheckpointError(
                f"{digest.num_bytes} bytes of weights {self._incoming.heading.version} came from rank "
                f"{share.holder}, which has {share.num_bytes}, or other bytes than it has"
            )

    def _put(self, piece: SharePiece, digest: ShareDigest) -> None:
        self._incoming.place(piece)
        digest.add(piece)


class _ShareLink:
    """The connection to one rank.

    Attributes:
        door: place at which it connects.
        next_at: place of the first byte of its next piece.
    """

    def __init__(self, key: str, entrance: Entrance) -> None:
        self._codec = Codec()
        self._news: asyncio.Queue[Frames] = asyncio.Queue()  # bounded by what is asked for
        self.next_at = 0
        self._open = OpenDoor(key, self._news.put_nowait, entrance)
        self.door = self._open.door

    async def next_piece(self, rank: int) -> SharePiece:
        """Return the next piece. Raises: WeightsNotGiven if it does not come, or is none."""
        try:
            async with asyncio.timeout(SILENT_S):
                frames = await self._news.get()
            piece: SharePiece = self._codec.decode(self._codec.decoder(SharePiece), frames)
        except TimeoutError:
            raise WeightsNotGiven(f"rank {rank} was silent for {SILENT_S:g} s") from None
        except (MalformedMessage, msgspec.ValidationError) as error:
            raise WeightsNotGiven(
                f"rank {rank} sent something else than weights: {error}"
            ) from error
        if piece.next_at <= self.next_at:
            raise WeightsNotGiven(f"a piece of rank {rank} leads back to byte {piece.next_at}")
        return piece

    def ask(self) -> None:
        """Ask for one piece more."""
        self._open.send(self._codec.encode(Kind.CALL, 0, 0, 0, None, "wanted weights"))

    def close(self) -> None:
        """Close door and connection."""
        self._open.close()
