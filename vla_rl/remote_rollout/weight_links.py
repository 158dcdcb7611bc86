"""Weights on their way into a host's memory: from the host before it, or from the learner's ranks.

    receiver: WantedWeights(start) ──► peer: the bytes, as soon as it has them ──► receiver
    keys of the ranks ──► a socket for each ──► rank: a piece ──► its offset in the row

A peer passes bytes on while they come in, and the receiver asks for a few pieces ahead, which bounds
what is on the way. Of what ranks send, the beginning of the row is complete as far as the rank that is
furthest behind has come: that much is passed on.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Final

import msgspec
import numpy as np

from vla_rl.actors.placement import KeyPair
from vla_rl.actors.remote.direct_link import DirectLink
from vla_rl.actors.remote.host_connection import LINK_WITHIN_S
from vla_rl.actors.remote.peer_sockets import ServerContext, ServerSocket, SocketAddress, open_link
from vla_rl.actors.wire.codec import Codec
from vla_rl.actors.wire.envelope import Frames, Kind, MalformedMessage, unpack_envelope
from vla_rl.engines.weight_shards import ShardDigest, ShardPiece, WeightShard
from vla_rl.errors import CheckpointError, WeightsNotGiven
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

_PIECES_AHEAD: Final = 8
"""Pieces that are asked for before one has come: enough to fill a cable whose ends are woken late, as
on a busy machine."""

_LOOK_EVERY_S: Final = 0.5


class WantedWeights(msgspec.Struct, frozen=True):
    """A request for the bytes of a version from one place on."""

    member: str
    version: int
    start: int
    num_bytes: int


class WeightSender:
    """Gives one peer what this host has of a policy's weights, or gets meanwhile.

    Args:
        peer_key: public key of the only peer that may connect.
        row_layout: returns the weights of a member; None if it has none.
    """

    def __init__(self, receiver_key: str, row_of: Callable[[str], IncomingWeights | None]) -> None:
        self._row_of, self._codec = row_of, Codec()
        self._wanted: list[WantedWeights] = []
        self._open = ServerSocket(receiver_key, self._on_message)
        self.address = self._open.address
        """Address at which the peer connects."""

    def start_sending(self) -> None:
        """Send what is wanted and has come by now."""
        waiting: list[WantedWeights] = []
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
            wanted = self._codec.decode(self._codec.get_decoder(WantedWeights), frames)
        except (MalformedMessage, msgspec.ValidationError):
            return
        self._wanted.append(wanted)
        self.start_sending()

    def _send(self, kind: Kind, value: np.ndarray | str) -> None:
        self._open.send_frames(self._codec.encode(kind, 0, 0, 0, value, "weights"))


class WeightReceiver:
    """Takes the rest of a version from a peer.

    Args:
        keys: those whose public one the peer was given.
        incoming: the version; its bytes may come from elsewhere before and afterwards.
        came: called after each piece.
    """

    def __init__(self, keys: KeyPair, incoming: IncomingWeights, came: Callable[[], None]) -> None:
        self._keys, self._incoming, self._came = keys, incoming, came
        self._codec = Codec()
        self._news: asyncio.Queue[Frames | None] = asyncio.Queue()  # bounded by what is asked for

    async def receive_weights(self, host: str, socket: SocketAddress) -> ReceivedBytes:
        """Take all that is missing; return how far it came if the peer is lost meanwhile.

        Args:
            host: address of the peer's host, without a port.
            socket: its address there.

        Raises: CheckpointError for bytes that do not fit.
        """
        put = self._news.put_nowait
        try:
            with open_link(host, socket, self._keys, put, lambda: put(None)) as link:
                fault, is_unreachable = await self._receive_all(link)
        except ConnectionError as error:
            fault, is_unreachable = f"its socket cannot be used: {error}", True
        return ReceivedBytes(
            num_bytes=self._incoming.num_received, fault=fault, is_unreachable=is_unreachable
        )

    async def _receive_all(self, link: DirectLink) -> tuple[str, bool]:
        """Return what is wrong with the peer, and whether it was never reached."""
        incoming, total = self._incoming, self._incoming.heading.num_bytes
        asked, received_s = self._ask_ahead(link, incoming.num_received), time.monotonic()
        began_s = received_s
        while incoming.num_received < total:
            try:
                async with asyncio.timeout(_LOOK_EVERY_S):
                    frames = await self._news.get()
            except TimeoutError:
                now = time.monotonic()
                if not link.is_up and now - began_s > LINK_WITHIN_S:
                    return f"{link.address} does not answer within {LINK_WITHIN_S:g} s", True
                if now - received_s > SILENT_S:
                    return f"{link.address} was silent for {SILENT_S:g} s", False
                continue
            if frames is None:
                return f"the connection to {link.address} was lost", not link.is_up
            received_s = time.monotonic()
            try:
                if unpack_envelope(frames[0])[0] == Kind.ERROR:
                    return str(self._codec.decode(self._codec.get_decoder(str), frames)), False
                piece = self._codec.decode(self._codec.get_decoder(np.ndarray), frames)
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
        most = min(
            incoming.num_received + _PIECES_AHEAD * WEIGHT_PIECE_BYTES, incoming.heading.num_bytes
        )
        while asked < most:
            self._ask(link, asked)
            asked += WEIGHT_PIECE_BYTES
        return asked

    def _ask(self, link: DirectLink, start: int) -> None:
        heading = self._incoming.heading
        wanted = WantedWeights(heading.member, heading.version, start, WEIGHT_PIECE_BYTES)
        link.send_frames(self._codec.encode(Kind.CALL, 0, 0, 0, wanted, "wanted weights"))


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
            link.ask()
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

    def ask(self) -> None:
        """Ask for one piece more."""
        self._open.send_frames(self._codec.encode(Kind.CALL, 0, 0, 0, None, "wanted weights"))

    def close(self) -> None:
        """Close socket and connection."""
        self._open.close()
