"""Sources of a version of the weights, before any host has it.

    one process learns    apply_weights ─► a copy: LocalWeightSource ──────────┐
    ranks learn           receive_shards ─► their shards: ShardedWeightSource ┴► `HostWeights.publish`

No process has a copy of what ranks hold: each gives its shard.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from torch import nn

from vla_rl.engines.weight_shards import ShardHolders, ShardSocket, WeightShard
from vla_rl.errors import CheckpointError, HostNotReached, WeightsNotGiven
from vla_rl.remote_rollout.flat_weights import (
    FlatWeights,
    WeightHeading,
    flatten_weights,
    make_heading,
    row_layout,
    weights_digest,
)
from vla_rl.remote_rollout.rollout_host import RolloutHost


@dataclass(frozen=True)
class WeightHost:
    """A process that gets weights."""

    actor: RolloutHost
    address: str
    """Address of its host, without a port, at which its peers and the ranks find it."""

    gone: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once it is lost, or has failed, so that its peers do not wait for it."""


_IN_FLIGHT: Final = 8
"""Pieces that were sent to a host and are not in its memory yet."""


class WeightSource(Protocol):
    """One version of a policy's weights, where it comes from."""

    @property
    def heading(self) -> WeightHeading:
        """Heading that a host gets before the bytes."""
        ...

    @property
    def machines(self) -> frozenset[str]:
        """Names of the hosts that have a part of it."""
        ...

    @property
    def is_kept(self) -> bool:
        """Whether the bytes stay the same while the learner goes on."""
        ...

    async def is_same_as(self, other: "WeightSource") -> bool:
        """Return whether the bytes are known to be the same."""
        ...

    async def fetch_digest(self) -> str | None:
        """Return the digest of all bytes; None while no process has had all of them."""
        ...

    async def bring(self, host: WeightHost, num_bytes: int) -> None:
        """Bring the bytes to a host that has the first `num_bytes`, and have all of them checked.

        Raises: CheckpointError if other bytes arrive; WeightsNotGiven; ActorDied; RankFailed.
        """
        ...


class LocalWeightSource:
    """A version that this process has. Args: `weights`, the version."""

    machines: frozenset[str] = frozenset()
    """None but the machine of the control process."""

    is_kept = True
    """It is a copy."""

    def __init__(self, weights: FlatWeights) -> None:
        self._weights, self._reading = weights, asyncio.Lock()

    @property
    def heading(self) -> WeightHeading:
        """Heading that a host gets before the bytes."""
        return self._weights.heading

    async def is_same_as(self, other: WeightSource) -> bool:
        """Return whether the bytes are known to be the same."""
        if not isinstance(other, LocalWeightSource):
            return False
        return await asyncio.to_thread(self._weights.equals, other._weights)

    async def fetch_digest(self) -> str:
        """Return the digest of all bytes."""
        async with self._reading:  # they are read once
            return await asyncio.to_thread(lambda: self._weights.digest)

    async def bring(self, host: WeightHost, num_bytes: int) -> None:
        """Send the rest to a host, and have all bytes compared with the digest."""
        member, actor = self.heading.member, host.actor
        digest = asyncio.create_task(self.fetch_digest())  # beside the pieces
        on_their_way: deque[asyncio.Task[None]] = deque()
        try:
            # Several pieces ahead: if each waited for the answer to the last one, the cable would be
            # idle for a round trip a piece.
            for offset, piece in self._weights.pieces(num_bytes):
                on_their_way.append(asyncio.create_task(actor.put_weights(member, offset, piece)))
                if len(on_their_way) == _IN_FLIGHT:
                    await on_their_way.popleft()
            while on_their_way:
                await on_their_way.popleft()
            await actor.check_weights(member, await digest)
        finally:
            for task in (digest, *on_their_way):
                task.cancel()
            await asyncio.gather(digest, *on_their_way, return_exceptions=True)


class ShardedWeightSource:
    """A version of which each rank has a shard.

    The host that takes it from there computes the digest of the row; the others are compared with it.
    The ranks give their newest weights alone, so it is gone with their next optimizer step.

    Args:
        heading: names, forms and number of bytes.
        holders: the ranks.
        shards: what each of them holds, with digests.
        digest: digest of all bytes, if it is known.
    """

    is_kept = False

    def __init__(
        self,
        heading: WeightHeading,
        holders: ShardHolders,
        shards: Sequence[WeightShard],
        digest: str | None,
    ) -> None:
        self.heading = heading
        self._holders, self._shards, self._digest = holders, shards, digest
        self._receiving: list[asyncio.Task[None]] = []
        self._fault = ""

    @property
    def machines(self) -> frozenset[str]:
        """Names of the hosts that have a part of it."""
        return frozenset(shard.host for shard in self._shards)

    async def is_same_as(self, other: WeightSource) -> bool:
        """Return whether the bytes are known to be the same."""
        return isinstance(other, ShardedWeightSource) and self._contents == other._contents

    async def fetch_digest(self) -> str | None:
        """Return the digest that the first host has computed; None before."""
        return self._digest

    async def bring(self, host: WeightHost, num_bytes: int) -> None:
        """Let a host take all shards, or compare what it has already."""
        # All bytes came from a peer. To take the shards as well would cost the ranks a second copy, so
        # the digest of a host that takes them now is waited for.
        if num_bytes == self.heading.num_bytes:
            digest = await self._digest_of_others()
            if digest is not None:
                await host.actor.check_weights(self.heading.member, digest)
                return
        if num_bytes:
            # a shard has no rest: its digest is that of all of its pieces
            await host.actor.begin_weights(self.heading)
        receiving = asyncio.create_task(self._receive(host))
        self._receiving.append(receiving)
        await receiving

    async def _digest_of_others(self) -> str | None:
        """Return the digest, if any host that takes the shards now gets to its end."""
        while self._digest is None:
            self._receiving = [each for each in self._receiving if not each.done()]
            if not self._receiving:
                break
            await asyncio.wait(self._receiving, return_when=asyncio.FIRST_COMPLETED)
        return self._digest

    async def _receive(self, host: WeightHost) -> None:
        """Let a host take all shards; note the digest of the row."""
        try:
            digest = await self._receive_shards(host)
        except HostNotReached as fault:
            self._fault = str(fault)
            raise
        if self._digest not in (None, digest):
            raise CheckpointError(
                f"weights {self.heading.version} of {self.heading.member!r} have the digest {digest} "
                f"on a host, expected {self._digest} as on the first one"
            )
        self._digest = digest

    async def _receive_shards(self, host: WeightHost) -> str:
        """Let a host take all shards; return the digest of the row."""
        member = self.heading.member
        async with self._holders.turn:
            if self._fault:  # it goes another way now, and other hosts need not try
                raise WeightsNotGiven(self._fault)
            links = await self._holders.new_links(self._shards)
            try:
                listening = await host.actor.open_sockets(member, links)
            except OSError as error:
                raise HostNotReached(str(error)) from error
            sockets = [
                ShardSocket(address=f"tcp://{host.address}:{each.port}", public_key=each.public_key)
                for each in listening
            ]
            receiving = asyncio.create_task(host.actor.receive_shards(member, list(self._shards)))
            sending = asyncio.create_task(self._holders.send_shards(self._shards, links, sockets))
            try:
                await asyncio.wait((receiving, sending), return_when=asyncio.FIRST_COMPLETED)
                if not receiving.done():
                    await self._explain(sending, receiving)
                return await receiving
            finally:
                for task in (receiving, sending):
                    task.cancel()
                await asyncio.gather(receiving, sending, return_exceptions=True)

    async def _explain(self, sending: "asyncio.Task[None]", receiving: "asyncio.Task[str]") -> None:
        """Raise what ended the giving, unless it is the death of the host."""
        error = sending.exception()
        if error is None:
            return
        if isinstance(error, WeightsNotGiven):
            # a host that dies closes its connections before its death is known here
            await asyncio.wait((receiving,), timeout=_KNOWN_WITHIN_S)
            if receiving.done():
                return
        raise error

    @property
    def _contents(self) -> tuple[object, ...]:
        """Everything that is the same for the same bytes, held by the same ranks."""
        shards = tuple((each.holder, each.num_bytes, each.digest) for each in self._shards)
        return self.heading.names, self.heading.forms, shards


_KNOWN_WITHIN_S: Final = 5.0
"""Time in which the death of a host is known after its connections have closed."""


class MemberWeightSink:
    """A `WeightSink` for one policy, whose weights act on other hosts.

    Args:
        name: member name of the policy.
        publish_blocking: begins to apply a version on every host. Blocks: it is called on the device lane.
        publish: does the same in the loop.
    """

    def __init__(
        self,
        name: str,
        publish_blocking: Callable[[WeightSource], None],
        publish: Callable[[WeightSource], Awaitable[None]],
    ) -> None:
        self._name, self._publish_blocking, self._publish = name, publish_blocking, publish
        self._nothing = nn.Module()

    @property
    def network(self) -> nn.Module:
        """None: the weights that act are on other hosts, and never the learner's own."""
        return self._nothing

    def apply_weights(self, network: nn.Module, weight_version: int) -> None:
        """Begin to apply weights and their version on every host. Call it on the device lane."""
        self._publish_blocking(
            LocalWeightSource(flatten_weights(network, weight_version, self._name))
        )

    async def receive_shards(
        self, holders: ShardHolders, network: nn.Module, weight_version: int, *, is_current: bool
    ) -> None:
        """Begin to apply a version on every host, and return once the ranks have given it.

        See `ShardSink`.
        """
        begins, row_bytes = row_layout(network)
        shards = await holders.describe_shards(begins, row_bytes)
        heading = make_heading(network, weight_version, self._name)
        digest = await asyncio.to_thread(weights_digest, network) if is_current else None
        await self._publish(ShardedWeightSource(heading, holders, shards, digest))
