"""The newest weights of each policy to every host: all of them stage a version, then all apply it.

    adopt (device lane) ─► copy ─┐
    take_shares: from the ranks ─┴► stage on each host, beside running episodes ─► apply on each
    a host that is away meanwhile gets the newest version before it runs episodes again

One copy leaves the control process or the ranks, whatever the number of hosts: `spreading`.

A host that fails is dropped, and the others go on. Publications and hosts that join take turns, so
that no host can miss a version.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final

from msgspec.structs import replace
from torch import nn

from vla_rl.engines.weight_shares import ShareHolders
from vla_rl.errors import ActorDied, HostNotReached, WeightsNotGiven
from vla_rl.training.hosts.delivery_plan import Delivery, deliveries, machine_of
from vla_rl.training.hosts.flat_weights import digest_of, flattened, heading_of, row_of
from vla_rl.training.hosts.messages import HeldVersion, HostStatus
from vla_rl.training.hosts.origins import HeldByRanks, HeldHere, Origin
from vla_rl.training.hosts.rollout_host import RolloutHost
from vla_rl.training.hosts.spreading import Spreading
from vla_rl.training.hosts.weight_host import WeightHost
from vla_rl.types import Roster

logger = logging.getLogger(__name__)

_TRIED_EVERY_S: Final = 1.0
"""Seconds between two attempts to give a host that joins its weights."""


class HostWeights:
    """The weights of all policies of a run that act on other hosts.

    Args:
        roster: names of the policies.
        weight_version: version that hosts are brought up with.
        lost: called with a host's name and the cause if it did not take a version.
        published: called with the version that all hosts serve of every policy.
    """

    def __init__(
        self,
        roster: Roster,
        weight_version: int,
        lost: Callable[[str, ActorDied], None],
        published: Callable[[int], None],
    ) -> None:
        self.turn = asyncio.Lock()
        """Held by a publication, and by a host while it joins."""

        self.hosts: dict[str, WeightHost] = {}
        """The hosts that get new versions, by name."""

        self._stocked: dict[str, tuple[str, ...]] = {}
        self._unreachable: set[tuple[str, str]] = set()
        self._not_reached: set[str] = set()

        self._roster, self._lost, self._published = roster, lost, published
        self._versions = dict.fromkeys(roster.names, weight_version)
        self._newest: dict[str, Origin] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._update_s = dict.fromkeys(roster.names, 0.0)
        self.sinks: Mapping[str, MemberWeights] = {
            name: MemberWeights(self, name) for name in roster.names
        }
        """Receivers of the learners' weights, by member name."""

    def leave(self, name: str) -> None:
        """Note that a host is lost: it gets no versions, and its neighbours wait for it no longer."""
        host = self.hosts.pop(name, None)
        if host is not None:
            host.gone.set()

    def open(self) -> None:
        """Publish every version from now on, in this loop."""
        self._loop = asyncio.get_running_loop()

    def close(self) -> None:
        """Store later versions only."""
        self._loop = None

    def adopt(self, newest: Origin) -> None:
        """Apply a version of one policy on every host. Blocks: call it on the device lane.

        The lane waits for it, so that no update begins before all hosts have the weights of the
        last one.
        """
        if self._loop is None:
            self._note(newest)
        else:
            asyncio.run_coroutine_threadsafe(self.publish(newest), self._loop).result()

    async def publish(self, newest: Origin) -> None:
        """Apply a version of one policy on every host.

        Raises: WeightsNotGiven, RankFailed, CheckpointError; then no host has applied it.
        """
        if self._loop is None:
            # a resume: hosts are brought up later, with the policy's files of these weights; those
            # that are taken over get them from where they are now
            self._note(newest)
            return
        member, began = newest.heading.member, time.perf_counter()
        async with self.turn:
            await self._publish(newest)
        self._update_s[member] = time.perf_counter() - began

    @property
    def has_newest(self) -> bool:
        """Whether the newest versions can be given to a host that has other weights."""
        return all(name in self._newest for name in self._roster.names)

    async def join(
        self,
        name: str,
        host: WeightHost,
        status: HostStatus,
        *,
        is_new: bool,
        admit: Callable[[HostStatus], None],
    ) -> None:
        """Give a host the newest versions, and from then on every version.

        Args:
            name, host, status, is_new: those of `catch_up`.
            admit: called with the versions that it has then, before any newer one.

        Raises: ActorDied; CheckpointError; RankFailed.
        """
        while True:
            # under one lock with publications: a version published meanwhile would be missed
            async with self.turn:
                try:
                    held = await self.catch_up(name, host, status, is_new=is_new)
                except WeightsNotGiven as fault:
                    logger.info("host %s waits for weights: %s", name, fault)
                else:
                    self.hosts[name] = host
                    admit(replace(status, held=held))
                    return
            # no host has them, and the ranks have newer ones, which are published soon
            await asyncio.sleep(_TRIED_EVERY_S)

    async def catch_up(
        self, name: str, host: WeightHost, status: HostStatus, *, is_new: bool
    ) -> dict[str, HeldVersion]:
        """Give a host that joins the newest versions that it lacks; return what it has then.

        They come from another host that has them, if there is one, else from where they are now.
        Hold `turn`.

        Args:
            name: its name.
            host: the process there.
            status: what it offers.
            is_new: whether it has read the policies' files of this run just now.

        Raises: ActorDied; CheckpointError; RankFailed; WeightsNotGiven if the ranks have newer
            weights by now, which are published soon.
        """
        return {
            member: await self._caught_up(member, name, host, status.held[member], is_new=is_new)
            for member in self._roster.names
        }

    def metrics(self) -> dict[str, float]:
        """Return the seconds that the newest version of each policy took to every host."""
        return {
            f"{self._roster.prefix(name)}hosts/weights_s": seconds
            for name, seconds in self._update_s.items()
        }

    async def _caught_up(
        self, member: str, name: str, host: WeightHost, held: HeldVersion, *, is_new: bool
    ) -> HeldVersion:
        newest = self._newest.get(member)
        if newest is None:
            return HeldVersion(version=self._versions[member])
        if is_new and held.version == newest.heading.version:
            return held
        digest = await newest.digest()
        # the same number is not enough: an update that is repeated need not have the same weights
        if digest is not None and held == HeldVersion(
            version=newest.heading.version, digest=digest
        ):
            return held
        stocked = self._stocked.get(member, ())
        having = [each for each in stocked if each in self.hosts and each != name]
        planned = deliveries([name], having, self._unreachable)
        spreading = Spreading(newest, {**self.hosts, name: host}, self._unreachable)
        for error in (await spreading.stage(planned)).values():
            raise error
        await host.actor.apply_weights(member)
        self._stocked[member] = (*having, *_with_rows(planned))
        return HeldVersion(version=newest.heading.version, digest=await newest.digest() or "")

    async def _publish(self, newest: Origin) -> None:
        member, version = newest.heading.member, newest.heading.version
        before = self._newest.get(member)
        if before is not None and await newest.is_same_as(before):
            # a policy whose turn it is not, or an update that taught nothing
            await self._each(lambda host: host.renew_weights(member, version))
        else:
            planned = deliveries(self._in_order(newest), (), self._unreachable)
            spreading = Spreading(newest, dict(self.hosts), self._unreachable)
            failed = await spreading.stage(planned)
            self._require_reached(failed)
            self._drop(failed)
            await self._each(lambda host: host.apply_weights(member))
            self._stocked[member] = _with_rows(planned)
        self._note(newest)

    def _in_order(self, newest: Origin) -> list[str]:
        """Return the hosts, the one that takes a version from its origin first."""

        def rank(name: str) -> tuple[bool, bool]:
            # a part that is on the machine already uses no cable
            machine = machine_of(name)
            return machine in self._not_reached, machine not in newest.machines

        return sorted(self.hosts, key=rank)

    def _require_reached(self, failed: Mapping[str, BaseException]) -> None:
        """Note hosts that no rank can reach: another one takes the next version first.

        Raises: HostNotReached if there is no other.
        """
        faults = {
            name: error for name, error in failed.items() if isinstance(error, HostNotReached)
        }
        self._not_reached |= {machine_of(name) for name in faults}
        for error in faults.values():
            is_hopeless = {machine_of(name) for name in self.hosts} <= self._not_reached
            raise error if is_hopeless else WeightsNotGiven(str(error))

    def _note(self, newest: Origin) -> None:
        heading = newest.heading
        self._newest[heading.member] = newest
        self._versions[heading.member] = heading.version
        self._published(min(self._versions.values()))

    async def _each(self, work: Callable[[RolloutHost], Awaitable[None]]) -> None:
        """Do the same on all hosts at once; drop those that are gone, and raise all else."""
        named = dict(self.hosts)
        done = await asyncio.gather(
            *(work(host.actor) for host in named.values()), return_exceptions=True
        )
        self._drop(
            {name: error for name, error in zip(named, done, strict=True) if error is not None}
        )

    def _drop(self, failed: Mapping[str, BaseException]) -> None:
        """Drop hosts that are gone. Raises: any other error."""
        for name, error in failed.items():
            if not isinstance(error, ActorDied):
                raise error
            self.leave(name)
            self._lost(name, error)


class MemberWeights:
    """A `WeightSink` for one policy, whose weights act on other hosts.

    Args:
        weights: those of all policies.
        name: member name of this one.
    """

    def __init__(self, weights: HostWeights, name: str) -> None:
        self._weights, self._name = weights, name
        self._nothing = nn.Module()

    @property
    def network(self) -> nn.Module:
        """None: the weights that act are on other hosts, and never the learner's own."""
        return self._nothing

    def adopt(self, network: nn.Module, weight_version: int) -> None:
        """Apply weights and their version on every host. Call it on the device lane."""
        self._weights.adopt(HeldHere(flattened(network, weight_version, self._name)))

    async def take_shares(
        self, holders: ShareHolders, network: nn.Module, weight_version: int, *, is_current: bool
    ) -> None:
        """Apply a version on every host that the ranks give. See `ShareSink`."""
        begins, row_bytes = row_of(network)
        shares = await holders.shares(begins, row_bytes)
        heading = heading_of(network, weight_version, self._name)
        digest = await asyncio.to_thread(digest_of, network) if is_current else None
        await self._weights.publish(HeldByRanks(heading, holders, shares, digest))


def _with_rows(planned: Sequence[Delivery]) -> tuple[str, ...]:
    """Return the hosts that have the bytes in memory of their own."""
    return tuple(each.host for each in planned if not each.opens_memory)
