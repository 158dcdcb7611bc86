"""Weights on their way into a host's memory: from the host before it, or from the learner's ranks.

    receiver, with a handle of its peer's rows: a stream from the first byte that is missing
    keys of the ranks ──► a socket for each ──► rank: a piece ──► its offset in the row

A peer passes bytes on while they come in; the credit of the stream bounds what is on the way. Of what
ranks send, the beginning of the row is complete as far as the rank that is furthest behind has come:
that much is passed on.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack
from typing import Any, Final, Protocol

import msgspec
import numpy as np

from vla_rl.actors import Actor, actor_method, close_handle
from vla_rl.actors.remote.peer_sockets import ServerContext, ServerSocket, SocketAddress
from vla_rl.actors.wire.codec import Codec
from vla_rl.actors.wire.envelope import Frames, Kind, MalformedMessage
from vla_rl.engines.weight_shards import ShardDigest, ShardPiece, WeightShard
from vla_rl.errors import ActorDied, CheckpointError, WeightsNotGiven
from vla_rl.remote_rollout.flat_weights import WEIGHT_PIECE_BYTES, IncomingWeights
from vla_rl.util.tasks import run_in_thread


class ReceivedBytes(msgspec.Struct, frozen=True, kw_only=True):
    """How far a host came with taking weights from a peer."""

    num_bytes: int
    """Bytes that it has, from the first one on."""

    fault: str = ""
    """Why the rest did not come from there; empty if all came."""

    is_unreachable: bool = False
    """Whether no connection could be made."""


SILENT_S: Final = 30.0
"""Silence after which a peer counts as lost. Its death is noticed sooner: its connection closes,
or the control process misses it."""


class GivesWeights(Protocol):
    """A store of weights, as its `WeightRows` see it."""

    def get_row(self, member: str) -> IncomingWeights | None:
        """Return the version of a policy that was begun last; None if it has none."""
        ...

    async def wait_for_bytes(self) -> None:
        """Wait until more bytes of any version have come, or a version was begun."""
        ...


class WeightRows(Actor):
    """Gives peers what their host has of weights, or gets meanwhile, each over a handle of its own.

    It is in the loop of the process that has them, beside what it does else.

    Args:
        store: a `GivesWeights`.
    """

    def __init__(self, store: Any) -> None:
        self._store: GivesWeights = store

    # waits for: the next piece of the row   woken by: each piece that comes, and a version that is begun;
    #                                        the end of the connection cancels the call
    @actor_method(concurrent=True)
    async def stream_pieces(
        self, member: str, version: int, start: int
    ) -> AsyncIterator[np.ndarray]:
        """Yield the bytes of a version from one place on, as soon as they are here.

        Raises: WeightsNotGiven if this is not the version that was begun last.
        """
        while True:
            row = self._store.get_row(member)
            if row is None or row.heading.version != version:
                raise WeightsNotGiven(f"it has no version {version} of {member!r}")
            if start == row.heading.num_bytes:
                return
            # whole pieces: a receiver passes each on, and small ones cost a message each
            if row.num_received < min(start + WEIGHT_PIECE_BYTES, row.heading.num_bytes):
                await self._store.wait_for_bytes()
                continue
            piece = row.piece(start, WEIGHT_PIECE_BYTES)
            start += len(piece)
            yield piece

    @actor_method(concurrent=True)
    async def ping(self) -> None:
        """Return at once, so that a call tells whether there is a connection."""


async def receive_weights(
    rows: WeightRows, incoming: IncomingWeights, came: Callable[[], None]
) -> ReceivedBytes:
    """Take the rest of a version from a peer; return how far it came if the peer is lost meanwhile.

    Args:
        rows: handle of what the peer has.
        incoming: the version; its bytes may come from elsewhere before and afterwards.
        came: called after each piece.

    Raises: CheckpointError for bytes that do not fit.
    """
    fault, is_unreachable, heading = "", True, incoming.heading
    pieces = rows.stream_pieces(heading.member, heading.version, incoming.num_received)
    try:
        await rows.ping()
        is_unreachable = False
        while incoming.num_received < heading.num_bytes:
            # a peer that waits for its own peer is silent too, and as long
            async with asyncio.timeout(SILENT_S):
                piece = await anext(pieces)
            incoming.put(incoming.num_received, piece)
            came()
            await incoming.read_on()
    except TimeoutError:
        fault = f"it was silent for {SILENT_S:g} s"
    except ActorDied as death:
        fault = death.cause
    except (WeightsNotGiven, TypeError) as error:
        fault = str(error)
    finally:
        # first the connection: one that is silent would not end its stream
        close_handle(rows)
        await pieces.aclose()  # type: ignore[attr-defined]
    return ReceivedBytes(
        num_bytes=incoming.num_received, fault=fault, is_unreachable=is_unreachable
    )


_MAX_THREADS: Final = 4


class ShardReceiver:
    """Takes all shards of a version, at the same time.

    Args:
        keys: public keys of the ranks; one socket is opened for each.
        incoming: the version.
        came: called when the beginning of the row has become longer.

    Raises: OSError if no port is free.
    """

    def __init__(
        self, keys: Sequence[str], incoming: IncomingWeights, came: Callable[[], None]
    ) -> None:
        self._incoming, self._came = incoming, came
        self._open = ExitStack()
        context = ServerContext(min(max(len(keys), 1), _MAX_THREADS))
        self._open.callback(context.close)
        self._links: list[_ShardLink] = []
        try:
            for key in keys:
                link = _ShardLink(key, context)
                self._open.callback(link.close)
                self._links.append(link)
        except BaseException:
            self._open.close()
            raise
        context.authenticator.set_allowed_keys(keys)

    @property
    def addresses(self) -> list[SocketAddress]:
        """Places at which the ranks connect, in the order of their keys."""
        return [link.address for link in self._links]

    async def receive(self, shards: Sequence[WeightShard]) -> str:
        """Take the shards, in the order of the keys; return the digest of the row.

        Raises: CheckpointError for other bytes than the ranks have; WeightsNotGiven if one is silent.
        """
        try:
            async with asyncio.TaskGroup() as group:
                for link, shard in zip(self._links, shards, strict=True):
                    group.create_task(self._receive_shard(link, shard))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            self.close()
        return await self._incoming.accept(sum(shard.num_bytes for shard in shards))

    def close(self) -> None:
        """Close all sockets and connections."""
        self._open.close()

    async def _receive_shard(self, link: "_ShardLink", shard: WeightShard) -> None:
        total = self._incoming.heading.num_bytes
        digest = ShardDigest()
        while link.next_at < total:
            piece = await link.next_piece(shard.holder)
            # copied and read in a thread: other ranks' pieces, and episodes, come meanwhile
            await run_in_thread(self._put, piece, digest)
            link.next_at = piece.next_at
            link.ask_for_piece()
            self._incoming.advance(min(each.next_at for each in self._links))
            self._came()
            await self._incoming.read_on()
        if (digest.digest, digest.num_bytes) != (shard.digest, shard.num_bytes):
            raise CheckpointError(
                f"{digest.num_bytes} bytes of weights {self._incoming.heading.version} came from rank "
                f"{shard.holder}, which has {shard.num_bytes}, or other bytes than it has"
            )

    def _put(self, piece: ShardPiece, digest: ShardDigest) -> None:
        self._incoming.write_piece(piece)
        digest.add_piece(piece)


class _ShardLink:
    """The connection to one rank.

    Attributes:
        socket_address: address at which it connects.
        next_at: place of the first byte of its next piece.
    """

    def __init__(self, key: str, context: ServerContext) -> None:
        self._codec = Codec()
        self._news: asyncio.Queue[Frames] = asyncio.Queue()  # bounded by what is asked for
        self.next_at = 0
        self._open = ServerSocket(key, self._news.put_nowait, context)
        self.address = self._open.address

    async def next_piece(self, rank: int) -> ShardPiece:
        """Return the next piece. Raises: WeightsNotGiven if it does not come, or is none."""
        try:
            async with asyncio.timeout(SILENT_S):
                frames = await self._news.get()
            piece: ShardPiece = self._codec.decode(self._codec.get_decoder(ShardPiece), frames)
        except TimeoutError:
            raise WeightsNotGiven(f"rank {rank} was silent for {SILENT_S:g} s") from None
        except (MalformedMessage, msgspec.ValidationError) as error:
            raise WeightsNotGiven(
                f"rank {rank} sent something else than weights: {error}"
            ) from error
        if piece.next_at <= self.next_at:
            raise WeightsNotGiven(f"a piece of rank {rank} leads back to byte {piece.next_at}")
        return piece

    def ask_for_piece(self) -> None:
        """Ask for one piece more."""
        self._open.send_frames(self._codec.encode(Kind.CALL, 0, 0, 0, None, "wanted weights"))

    def close(self) -> None:
        """Close socket and connection."""
        self._open.close()
