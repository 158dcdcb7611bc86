"""The origin of a version of the weights: what has it before any host does.

HeldHere      one process learns: the control process has a copy, and sends it
HeldByRanks   several learn: each gives its share, and no process has a copy
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Final, Protocol

from vla_rl.engines.weight_shares import ShareDoor, ShareHolders, WeightShare
from vla_rl.errors import CheckpointError, HostNotReached, WeightsNotGiven
from vla_rl.remote_rollout.flat_weights import FlatWeights
from vla_rl.remote_rollout.messages import WeightHeading
from vla_rl.remote_rollout.weight_host import WeightHost

_IN_FLIGHT: Final = 8
"""Pieces that were sent to a host and are not in its memory yet."""


class Origin(Protocol):
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

    async def is_same_as(self, other: "Origin") -> bool:
        """Return whether the bytes are known to be the same."""
        ...

    async def digest(self) -> str | None:
        """Return the digest of all bytes; None while no process has had all of them."""
        ...

    async def bring(self, host: WeightHost, num_bytes: int) -> None:
        """Bring the bytes to a host that has the first `num_bytes`, and have all of them checked.

        Raises: CheckpointError if other bytes arrive; WeightsNotGiven; ActorDied; RankFailed.
        """
        ...


class HeldHere:
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

    async def is_same_as(self, other: Origin) -> bool:
        """Return whether the bytes are known to be the same."""
        if not isinstance(other, HeldHere):
            return False
        return await asyncio.to_thread(self._weights.equals, other._weights)

    async def digest(self) -> str:
        """Return the digest of all bytes."""
        async with self._reading:  # they are read once
            return await asyncio.to_thread(lambda: self._weights.digest)

    async def bring(self, host: WeightHost, num_bytes: int) -> None:
        """Send the rest to a host, and have all bytes compared with the digest."""
        member, actor = self.heading.member, host.actor
        digest = asyncio.create_task(self.digest())  # beside the pieces
        on_their_way: deque[asyncio.Task[None]] = deque()
        try:
            for place, piece in self._weights.pieces(num_bytes):
                on_their_way.append(asyncio.create_task(actor.put_weights(member, place, piece)))
                if len(on_their_way) == _IN_FLIGHT:
                    await on_their_way.popleft()
            while on_their_way:
                await on_their_way.popleft()
            await actor.check_weights(member, await digest)
        finally:
            for task in (digest, *on_their_way):
                task.cancel()
            await asyncio.gather(digest, *on_their_way, return_exceptions=True)


class HeldByRanks:
    """A version of which each rank has a share.

    The host that takes it from there computes the digest of the row; the others are compared with it.
    The ranks give their newest weights alone, so it is gone with their next optimizer step.

    Args:
        heading: names, forms and number of bytes.
        holders: the ranks.
        shares: what each of them holds, with digests.
        digest: digest of all bytes, if it is known.
    """

    is_kept = False

    def __init__(
        self,
        heading: WeightHeading,
        holders: ShareHolders,
        shares: Sequence[WeightShare],
        digest: str | None,
    ) -> None:
        self.heading = heading
        self._holders, self._shares, self._digest = holders, shares, digest
        self._taking: list[asyncio.Task[None]] = []
        self._fault = ""

    @property
    def machines(self) -> frozenset[str]:
        """Names of the hosts that have a part of it."""
        return frozenset(share.host for share in self._shares)

    async def is_same_as(self, other: Origin) -> bool:
        """Return whether the bytes are known to be the same."""
        return isinstance(other, HeldByRanks) and self._contents == other._contents

    async def digest(self) -> str | None:
        """Return the digest that the first host has computed; None before."""
        return self._digest

    async def bring(self, host: WeightHost, num_bytes: int) -> None:
        """Let a host take all shares, or compare what it has already."""
        if num_bytes == self.heading.num_bytes:
            digest = await self._digest_of_others()
            if digest is not None:
                await host.actor.check_weights(self.heading.member, digest)
                return
        if num_bytes:
            # a share has no rest: its digest is that of all of its pieces
            await host.actor.begin_weights(self.heading)
        taking = asyncio.create_task(self._take(host))
        self._taking.append(taking)
        await taking

    async def _digest_of_others(self) -> str | None:
        """Return the digest, if any host that takes the shares now gets to its end."""
        while self._digest is None:
            self._taking = [each for each in self._taking if not each.done()]
            if not self._taking:
                break
            await asyncio.wait(self._taking, return_when=asyncio.FIRST_COMPLETED)
        return self._digest

    async def _take(self, host: WeightHost) -> None:
        """Let a host take all shares; note the digest of the row."""
        try:
            digest = await self._taken(host)
        except HostNotReached as fault:
            self._fault = str(fault)
            raise
        if self._digest not in (None, digest):
            raise CheckpointError(
                f"weights {self.heading.version} of {self.heading.member!r} have the digest {digest} "
                f"on a host, expected {self._digest} as on the first one"
            )
        self._digest = digest

    async def _taken(self, host: WeightHost) -> str:
        """Let a host take all shares; return the digest of the row."""
        member = self.heading.member
        async with self._holders.turn:
            if self._fault:  # it goes another way now, and other hosts need not try
                raise WeightsNotGiven(self._fault)
            links = await self._holders.new_links(self._shares)
            try:
                doors = await host.actor.open_doors(member, links)
            except OSError as error:
                raise HostNotReached(str(error)) from error
            places = [
                ShareDoor(address=f"tcp://{host.address}:{door.port}", public_key=door.public_key)
                for door in doors
            ]
            taking = asyncio.create_task(host.actor.take_shares(member, list(self._shares)))
            giving = asyncio.create_task(self._holders.give(self._shares, links, places))
            try:
                await asyncio.wait((taking, giving), return_when=asyncio.FIRST_COMPLETED)
                if not taking.done():
                    await self._explain(giving, taking)
                return await taking
            finally:
                for task in (taking, giving):
                    task.cancel()
                await asyncio.gather(taking, giving, return_exceptions=True)

    async def _explain(self, giving: "asyncio.Task[None]", taking: "asyncio.Task[str]") -> None:
        """Raise what ended the giving, unless it is the death of the host."""
        error = giving.exception()
        if error is None:
            return
        if isinstance(error, WeightsNotGiven):
            # a host that dies closes its connections before its death is known here
            await asyncio.wait((taking,), timeout=_KNOWN_WITHIN_S)
            if taking.done():
                return
        raise error

    @property
    def _contents(self) -> tuple[object, ...]:
        """Everything that is the same for the same bytes, held by the same ranks."""
        shares = tuple((each.holder, each.num_bytes, each.digest) for each in self._shares)
        return self.heading.names, self.heading.forms, shares


_KNOWN_WITHIN_S: Final = 5.0
"""Time in which the death of a host is known after its connections have closed."""
