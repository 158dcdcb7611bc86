"""The newest weights of each policy to every host: all of them stage a version, then all apply it.

    adopt (device lane) ─► copy ─► stage on each host, beside running episodes ─► apply on each
    a host that is away meanwhile gets the newest version before it runs episodes again

A host that fails is dropped, and the others go on. Publications and hosts that join take turns, so
that no host can miss a version.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping

from torch import nn

from vla_rl.errors import ActorDied
from vla_rl.training.hosts.flat_weights import FlatWeights, flattened
from vla_rl.training.hosts.messages import HeldVersion, HostStatus, WeightHeading
from vla_rl.training.hosts.rollout_host import RolloutHost
from vla_rl.types import Roster


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

        self.hosts: dict[str, RolloutHost] = {}
        """The hosts that get new versions, by name."""

        self._roster, self._lost, self._published = roster, lost, published
        self._versions = dict.fromkeys(roster.names, weight_version)
        self._newest: dict[str, FlatWeights] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._update_s = dict.fromkeys(roster.names, 0.0)
        self.sinks: Mapping[str, MemberWeights] = {
            name: MemberWeights(self, name) for name in roster.names
        }
        """Receivers of the learners' weights, by member name."""

    def open(self) -> None:
        """Publish every version from now on, in this loop."""
        self._loop = asyncio.get_running_loop()

    def close(self) -> None:
        """Store later versions only."""
        self._loop = None

    def adopt(self, newest: FlatWeights) -> None:
        """Apply a version of one policy on every host. Blocks: call it on the device lane.

        The lane waits for it, so that no update begins before all hosts have the weights of the
        last one.
        """
        if self._loop is None:
            # a resume: hosts are brought up later, with the policy's files of these weights; those
            # that are taken over get them from here
            self._note(newest)
            return
        asyncio.run_coroutine_threadsafe(self._publish(newest), self._loop).result()

    @property
    def has_newest(self) -> bool:
        """Whether the newest versions can be given to a host that has other weights."""
        return all(name in self._newest for name in self._roster.names)

    async def catch_up(
        self, host: RolloutHost, status: HostStatus, *, is_new: bool
    ) -> dict[str, HeldVersion]:
        """Give a host that joins the newest versions that it lacks; return what it has then.

        Hold `turn`.

        Args:
            host: the actor there.
            status: what it offers.
            is_new: whether it has read the policies' files of this run just now.

        Raises: ActorDied; CheckpointError.
        """
        return {
            name: await self._caught_up(name, host, status.held[name], is_new=is_new)
            for name in self._roster.names
        }

    def metrics(self) -> dict[str, float]:
        """Return the seconds that the newest version of each policy took to every host."""
        return {
            f"{self._roster.prefix(name)}hosts/weights_s": seconds
            for name, seconds in self._update_s.items()
        }

    async def _caught_up(
        self, name: str, host: RolloutHost, held: HeldVersion, *, is_new: bool
    ) -> HeldVersion:
        newest = self._newest.get(name)
        if newest is None:
            return HeldVersion(version=self._versions[name])
        if is_new and held.version == newest.version:
            return held
        heading = await asyncio.to_thread(lambda: newest.heading)
        has = HeldVersion(version=newest.version, digest=heading.digest)
        # the same number is not enough: an update that is repeated need not have the same weights
        if held != has:
            await _stage(host, newest, heading)
            await host.apply_weights(name)
        return has

    async def _publish(self, newest: FlatWeights) -> None:
        name, began = newest.member, time.perf_counter()
        async with self.turn:
            before = self._newest.get(name)
            if before is not None and await asyncio.to_thread(newest.equals, before):
                # a policy whose turn it is not, or an update that taught nothing
                await self._each(
                    self.hosts.items(), lambda host: host.renew_weights(name, newest.version)
                )
            else:
                heading = await asyncio.to_thread(lambda: newest.heading)
                await self._each(self.hosts.items(), lambda host: _stage(host, newest, heading))
                await self._each(self.hosts.items(), lambda host: host.apply_weights(name))
            self._note(newest)
        self._update_s[name] = time.perf_counter() - began

    def _note(self, newest: FlatWeights) -> None:
        self._newest[newest.member] = newest
        self._versions[newest.member] = newest.version
        self._published(min(self._versions.values()))

    async def _each(
        self,
        hosts: Iterable[tuple[str, RolloutHost]],
        work: Callable[[RolloutHost], Awaitable[object]],
    ) -> None:
        """Do the same on all hosts at once; drop those that are gone, and raise all else."""
        named = list(hosts)
        done = await asyncio.gather(*(work(host) for _, host in named), return_exceptions=True)
        for (name, _), result in zip(named, done, strict=True):
            if isinstance(result, ActorDied):
                self.hosts.pop(name, None)
                self._lost(name, result)
            elif isinstance(result, BaseException):
                raise result


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
        self._weights.adopt(flattened(network, weight_version, self._name))


async def _stage(host: RolloutHost, weights: FlatWeights, heading: WeightHeading) -> None:
    await host.begin_weights(heading)
    for start, piece in weights.pieces():
        await host.put_weights(heading.member, start, piece)
    await host.check_weights(heading.member)
