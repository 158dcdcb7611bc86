"""The chain broadcast of a version of a policy's weights, so that it enters every machine once.

    control process ─► gpu2:0 ─► gpu3:0 ─► gpu4:0        a chain: each cable carries one copy in, one out
                         ├ gpu2:1  reads the memory of gpu2:0
                         └ gpu2:2

Pieces are passed on as they come. What a peer that is lost has not passed on comes from the source.
Nothing acts with the version before `apply_weights` of every host.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence

import msgspec

from vla_rl.errors import ActorDied, CheckpointError, HostNotReached, RemoteError, WeightsNotGiven
from vla_rl.remote_rollout.weight_links import WeightRows
from vla_rl.remote_rollout.weight_sources import WeightHost, WeightSource
from vla_rl.util.tasks import await_unless


class Hop(msgspec.Struct, frozen=True, kw_only=True):
    """The way of a version of the weights to one process."""

    host: str
    """Its name: `gpu2`, or `gpu2:3` for one of several on a machine."""

    source: str | None = None
    """Name of the process that has the bytes, or gets them meanwhile; None: the control process."""

    opens_memory: bool = False
    """Whether the source is on the same machine, so that its memory can be read in place."""


def plan_hops(
    wanting: Sequence[str],
    having: Sequence[str] = (),
    unreachable: Collection[tuple[str, str]] = (),
) -> tuple[Hop, ...]:
    """Return a hop for each host that wants a version, each after that of its source.

    Args:
        wanting: hosts that lack the version.
        having: hosts that have all of its bytes in memory.
        unreachable: pairs (receiver, sender) of machines that cannot connect.
    """
    readers: dict[str, str] = {machine_name(name): name for name in having}
    # the newest link of the chain; a machine that has the bytes already may begin one
    tail = having[-1] if having else None
    chain: list[Hop] = []
    followers: list[Hop] = []
    for name in wanting:
        machine = machine_name(name)
        if machine in readers:
            followers.append(Hop(host=name, source=readers[machine], opens_memory=True))
            continue
        can_take = tail is not None and (machine, machine_name(tail)) not in unreachable
        chain.append(Hop(host=name, source=tail if can_take else None))
        readers[machine] = tail = name
    return (*chain, *followers)


def machine_name(name: str) -> str:
    """Return the machine of an engine's process: `gpu2` for `gpu2:3`."""
    return name.partition(":")[0]


class Reachability:
    """Ways of weights to hosts, as far as attempts to bring them have shown.

    Attributes:
        unreachable: pairs (receiver, sender) of machines that cannot connect; those that are found are
            added.
    """

    def __init__(self) -> None:
        self.unreachable: set[tuple[str, str]] = set()
        self._not_reached: set[str] = set()

    def planned(self, wanting: Sequence[str], having: Sequence[str] = ()) -> tuple[Hop, ...]:
        """Return a hop for each host that wants a version: see `plan_hops`."""
        return plan_hops(wanting, having, self.unreachable)

    def in_order(self, hosts: Iterable[str], machines: Collection[str]) -> list[str]:
        """Return hosts, the one that takes a version from its source first.

        Args: `machines`, those that have a part of the version.
        """

        def rank(name: str) -> tuple[bool, bool]:
            # a part that is on the machine already uses no cable
            machine = machine_name(name)
            return machine in self._not_reached, machine not in machines

        return sorted(hosts, key=rank)

    def require_reached(self, failed: Mapping[str, BaseException], hosts: Iterable[str]) -> None:
        """Note hosts that no rank can reach: another one of `hosts` takes the next version first.

        Raises: WeightsNotGiven if there are any; HostNotReached if there is no other.
        """
        for error in self.note_not_reached(failed):
            is_hopeless = {machine_name(name) for name in hosts} <= self._not_reached
            raise error if is_hopeless else WeightsNotGiven(str(error))

    def note_not_reached(self, failed: Mapping[str, BaseException]) -> list[HostNotReached]:
        """Note the machines that no rank can reach; return their errors."""
        faults = {
            name: error for name, error in failed.items() if isinstance(error, HostNotReached)
        }
        self._not_reached |= {machine_name(name) for name in faults}
        return list(faults.values())


logger = logging.getLogger(__name__)


class ChainBroadcast:
    """Brings one version to hosts.

    Args:
        weight_source: the version, where it comes from.
        hosts: those that want it and those that have it, by name.
        unreachable: pairs (receiver, sender) of machines that cannot connect; those that are found are
            added.
    """

    def __init__(
        self,
        weight_source: WeightSource,
        hosts: Mapping[str, WeightHost],
        unreachable: set[tuple[str, str]],
    ) -> None:
        self._weight_source, self._hosts, self._unreachable = weight_source, hosts, unreachable
        self._heading = weight_source.heading
        self._rows: dict[str, WeightRows] = {}
        """Handles of the rows of peers, by the host that takes them."""
        self._failed = {name: asyncio.Event() for name in hosts}
        self._staged: dict[str, asyncio.Task[None]] = {}

    async def stage(
        self, planned: Sequence[Hop], has_left: Callable[[], None] = lambda: None
    ) -> dict[str, BaseException]:
        """Carry out all hops; return the errors of those that failed, by host.

        Hosts that stay have all bytes then, and have compared them with the digest.

        Args:
            planned: the way to each host.
            has_left: called once the source has given all bytes to every host that gets them from
                there; it is asked again only for what a peer fails to pass on. Not called if
                it could not reach one of them, which needs the version from elsewhere.
        """
        received = [each for each in planned if not each.opens_memory]
        linked = [each for each in received if each.source is not None]
        try:
            # all begin before a peer asks one of them
            failed = await self._each(received, self._begin)
            # before the first bytes: behind those of a slow cable a question waits for its answer
            failed |= await self._each(linked, self._link)
            for each in reversed(planned):  # who takes is ready before who gives
                if each.host not in failed:
                    self._staged[each.host] = asyncio.create_task(self._carry_out(each))
            direct = [
                self._staged[each.host]
                for each in received
                if each.host in self._staged and each.host not in self._rows
            ]
            await asyncio.gather(*direct, return_exceptions=True)
            errors = [task.exception() for task in direct]
            if None in errors and not any(isinstance(each, WeightsNotGiven) for each in errors):
                has_left()
            await asyncio.gather(*self._staged.values(), return_exceptions=True)
        finally:
            for task in self._staged.values():
                task.cancel()
            await asyncio.gather(*self._staged.values(), return_exceptions=True)
        for host, task in self._staged.items():
            if (error := task.exception()) is not None:
                failed[host] = error
        return failed

    async def _each(
        self, planned: Sequence[Hop], work: Callable[[Hop], Awaitable[None]]
    ) -> dict[str, BaseException]:
        """Do the same for several hops at once; return the errors, by host."""
        done = await asyncio.gather(*map(work, planned), return_exceptions=True)
        failed = {
            each.host: error for each, error in zip(planned, done, strict=True) if error is not None
        }
        for host in failed:
            self._failed[host].set()
        return failed

    async def _begin(self, hop: Hop) -> None:
        await self._hosts[hop.host].actor.begin_weights(self._heading)

    async def _carry_out(self, hop: Hop) -> None:
        try:
            await self._bring(hop)
        except Exception:
            # its peers wait for it no longer, and raise errors of their own alone
            self._failed[hop.host].set()
            raise

    async def _bring(self, hop: Hop) -> None:
        name = hop.host
        host = self._hosts[name]
        if hop.opens_memory:
            if await self._open_memory(hop):
                return
            await self._begin(hop)
        elif name in self._rows:
            num_bytes = await self._receive_from_peer(hop, self._rows[name])
            try:
                await self._weight_source.bring(host, num_bytes)
            except CheckpointError as error:
                logger.warning(
                    "host %s has other weights from its peer than were sent (%s); it gets all "
                    "of them anew",
                    name,
                    error,
                )
                await self._begin(hop)
            else:
                return
        await self._weight_source.bring(host, 0)

    async def _open_memory(self, hop: Hop) -> bool:
        """Let a host read the memory of a process beside it; return whether it can."""
        assert hop.source is not None
        source, member = self._hosts[hop.source], self._heading.member
        staging = self._staged.get(hop.source)
        if staging is not None:
            await asyncio.wait((staging,))
            if staging.cancelled() or staging.exception() is not None:
                return False
        try:
            memory = await source.actor.share_weights(member)
        except ActorDied:
            return False
        digest = await self._weight_source.fetch_digest()
        assert digest is not None, "a host that has all bytes has computed their digest"
        try:
            await self._hosts[hop.host].actor.open_weights(self._heading, memory, digest)
        except CheckpointError as error:
            logger.warning("host %s gets weights of its own: %s", hop.host, error)
            return False
        return True

    async def _link(self, hop: Hop) -> None:
        """Let a host and its peer open a link; without one, its bytes come from the source."""
        name, source = hop.host, hop.source
        assert source is not None
        sender = self._hosts[source]
        if sender.gone.is_set() or self._failed[source].is_set():
            return
        try:
            self._rows[name] = await sender.actor.share_rows()
        except (ActorDied, RemoteError, OSError) as error:
            logger.warning("host %s gives no weights to %s: %s", source, name, error)

    async def _receive_from_peer(self, hop: Hop, rows: WeightRows) -> int:
        """Let a host take the bytes from its peer; return how many came from there."""
        name, source = hop.host, hop.source
        assert source is not None
        receiver, sender = self._hosts[name].actor, self._hosts[source]
        if sender.gone.is_set() or self._failed[source].is_set():
            return 0
        receiving = receiver.receive_weights(self._heading.member, rows)
        received = await await_unless(receiving, sender.gone, self._failed[source])
        if received is None:
            return await receiver.num_received(self._heading.member)
        if received.fault:
            logger.warning(
                "host %s gets no further weights from %s: %s", name, source, received.fault
            )
        if received.is_unreachable:
            self._unreachable.add((machine_name(name), machine_name(source)))
        return received.num_bytes
