"""One version of a policy's weights on its way into the memory of several hosts.

    here ─► first host ─► its neighbour ─► ...      as `delivery_plan` says; pieces are passed on as they come
      └───────────────────────┘ what a neighbour that is lost has not passed on comes from here

Nothing acts with it before `apply_weights` of every host.
"""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from vla_rl.errors import ActorDied, CheckpointError, RemoteError
from vla_rl.training.hosts.delivery_plan import Delivery, machine_of
from vla_rl.training.hosts.flat_weights import FlatWeights
from vla_rl.training.hosts.messages import Taken
from vla_rl.training.hosts.rollout_host import RolloutHost

logger = logging.getLogger(__name__)

_IN_FLIGHT = 4
"""Pieces that were sent to a host and are not in its memory yet."""


@dataclass(frozen=True)
class WeightHost:
    """A process that gets weights."""

    actor: RolloutHost
    address: str
    """Address of its host, without a port, at which its neighbours find it."""

    gone: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once it is lost, so that its neighbours do not wait for it."""


class Spreading:
    """Brings one version to hosts.

    Args:
        weights: the version.
        hosts: those that want it and those that have it, by name.
        unreachable: pairs (taker, giver) of machines that cannot connect; those that are found are
            added.
    """

    def __init__(
        self,
        weights: FlatWeights,
        hosts: Mapping[str, WeightHost],
        unreachable: set[tuple[str, str]],
    ) -> None:
        self._weights, self._hosts, self._unreachable = weights, hosts, unreachable
        self._heading = weights.heading
        self._staged: dict[str, asyncio.Task[None]] = {}

    async def stage(self, planned: Sequence[Delivery]) -> dict[str, BaseException]:
        """Carry out all deliveries; return the errors of those that failed, by host.

        Hosts that stay have all bytes then, and have compared them with the digest.
        """
        digest = asyncio.create_task(asyncio.to_thread(lambda: self._weights.digest))
        failed: dict[str, BaseException] = {}
        try:
            # all begin before a neighbour asks one of them
            received = [each for each in planned if not each.opens_memory]
            begun = await asyncio.gather(*map(self._begin, received), return_exceptions=True)
            for each, error in zip(received, begun, strict=True):
                if error is not None:
                    failed[each.host] = error
                    self._hosts[each.host].gone.set()
            for each in planned:
                if each.host not in failed:
                    self._staged[each.host] = asyncio.create_task(self._deliver(each, digest))
            await asyncio.gather(*self._staged.values(), return_exceptions=True)
        finally:
            for task in (digest, *self._staged.values()):
                task.cancel()
            await asyncio.gather(digest, *self._staged.values(), return_exceptions=True)
        for host, task in self._staged.items():
            if (error := task.exception()) is not None:
                failed[host] = error
        return failed

    async def _begin(self, delivery: Delivery) -> None:
        await self._hosts[delivery.host].actor.begin_weights(self._heading)

    async def _deliver(self, delivery: Delivery, digest: "asyncio.Task[str]") -> None:
        try:
            await self._bring(delivery, digest)
        except ActorDied:
            # its own death: those of its neighbours are not raised
            self._hosts[delivery.host].gone.set()
            raise

    async def _bring(self, delivery: Delivery, digest: "asyncio.Task[str]") -> None:
        name = delivery.host
        if delivery.opens_memory:
            if await self._opened(delivery, digest):
                return
            await self._begin(delivery)
        elif delivery.source is not None:
            num_bytes = await self._taken(delivery)
            try:
                await self._send(name, num_bytes, digest)
            except CheckpointError as error:
                logger.warning(
                    "host %s has other weights from its neighbour than were sent (%s); it gets all "
                    "of them from here",
                    name,
                    error,
                )
                await self._begin(delivery)
            else:
                return
        await self._send(name, 0, digest)

    async def _send(self, name: str, start: int, digest: "asyncio.Task[str]") -> None:
        """Send the bytes from `start` on, and have all of them compared with the digest."""
        host, member = self._hosts[name].actor, self._heading.member
        on_their_way: deque[asyncio.Task[None]] = deque()
        try:
            for place, piece in self._weights.pieces(start):
                call = host.put_weights(member, place, piece)
                on_their_way.append(asyncio.create_task(call))
                if len(on_their_way) == _IN_FLIGHT:
                    await on_their_way.popleft()
            while on_their_way:
                await on_their_way.popleft()
        finally:
            for task in on_their_way:
                task.cancel()
            await asyncio.gather(*on_their_way, return_exceptions=True)
        await host.check_weights(member, await asyncio.shield(digest))

    async def _opened(self, delivery: Delivery, digest: "asyncio.Task[str]") -> bool:
        """Let a host read the memory of a process beside it; return whether it can."""
        assert delivery.source is not None
        source, member = self._hosts[delivery.source], self._heading.member
        staging = self._staged.get(delivery.source)
        if staging is not None:
            await asyncio.wait((staging,))
            if staging.cancelled() or staging.exception() is not None:
                return False
        try:
            memory = await source.actor.share_weights(member)
        except ActorDied:
            return False
        shown = await asyncio.shield(digest)
        try:
            await self._hosts[delivery.host].actor.open_weights(self._heading, memory, shown)
        except CheckpointError as error:
            logger.warning("host %s gets weights of its own: %s", delivery.host, error)
            return False
        return True

    async def _taken(self, delivery: Delivery) -> int:
        """Let a host take the bytes from its neighbour; return how many came from there."""
        name, source = delivery.host, delivery.source
        assert source is not None
        taker, giver = self._hosts[name].actor, self._hosts[source]
        if giver.gone.is_set():
            return 0
        link_key = await taker.new_link()
        try:
            door = await giver.actor.give_weights(link_key)
        except (ActorDied, RemoteError, OSError) as error:
            logger.warning("host %s gives no weights to %s: %s", source, name, error)
            return 0
        taking = asyncio.create_task(
            taker.take_weights(self._heading.member, link_key, giver.address, door)
        )
        try:
            taken = await self._unless_gone(taking, giver)
        finally:
            with contextlib.suppress(ActorDied):
                await giver.actor.end_giving(link_key)
        if taken is None:
            return await taker.num_received(self._heading.member)
        if taken.fault:
            logger.warning(
                "host %s gets weights from here instead of from %s: %s", name, source, taken.fault
            )
        if taken.is_unreachable:
            self._unreachable.add((machine_of(name), machine_of(source)))
        return taken.num_bytes

    async def _unless_gone(self, taking: "asyncio.Task[Taken]", giver: WeightHost) -> Taken | None:
        """Wait for what a host takes; None if its neighbour is lost before."""
        gone = asyncio.create_task(giver.gone.wait())
        try:
            await asyncio.wait((taking, gone), return_when=asyncio.FIRST_COMPLETED)
            return taking.result() if taking.done() else None
        finally:
            for task in (taking, gone):
                task.cancel()
            await asyncio.gather(taking, gone, return_exceptions=True)
