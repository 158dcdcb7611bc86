"""The newest weights of each policy to every host: all of them stage a version, then all apply it.

    apply_weights (device lane) ─► copy ─┐
    receive_shards: from the ranks ──────┴► stage on each host, beside running episodes ─► apply on each
                                         └► once the bytes have left: the learner goes on
    a host that is away meanwhile gets the newest version before it runs episodes again

One copy leaves the control process or the ranks, whatever the number of hosts: `ChainBroadcast`. The learner
waits until it has left, and not for the slowest host: the next update begins while hosts pass the
version on. One version at a time is on its way, so a host is at most one behind.

A host that fails is dropped, and the others go on. Publications and hosts that join take turns, so
that no host can miss a version.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Final

from msgspec.structs import replace

from vla_rl.errors import ActorDied, WeightsNotGiven
from vla_rl.remote_rollout.chain_broadcast import ChainBroadcast, Hop, Reachability
from vla_rl.remote_rollout.flat_weights import HeldVersion
from vla_rl.remote_rollout.host_recipe import HostStatus
from vla_rl.remote_rollout.rollout_host import RolloutHost
from vla_rl.remote_rollout.weight_sources import MemberWeightSink, WeightHost, WeightSource
from vla_rl.types import AgentNames

logger = logging.getLogger(__name__)

_TRIED_EVERY_S: Final = 1.0
"""Seconds between two attempts to give a host that joins its weights."""


class HostWeights:
    """The weights of all policies of a run that act on other hosts.

    Args:
        roster: names of the policies.
        weight_version: version that hosts are brought up with.
        lost: called with a host's name and the cause if it did not take a version.
        announced: called with the version that is on its way to all hosts, of every policy.
        published: called with the version that all hosts serve of every policy.
    """

    def __init__(
        self,
        agent_names: AgentNames,
        weight_version: int,
        lost: Callable[[str, ActorDied], None],
        announced: Callable[[int], None],
        published: Callable[[int], None],
    ) -> None:
        # held by a publication of a policy; all of them by a host while it joins
        self._turns = {name: asyncio.Lock() for name in agent_names.names}
        self.hosts: dict[str, WeightHost] = {}
        """The hosts that get new versions, by name."""

        self._stocked: dict[str, tuple[str, ...]] = {}
        self._reach = Reachability()

        self._agent_names, self._lost = agent_names, lost
        self._announced, self._published = announced, published
        self._versions = dict.fromkeys(agent_names.names, weight_version)
        self._coming = dict(self._versions)
        self._on_their_way: dict[str, asyncio.Task[None]] = {}
        self._start: Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]] | None = None
        self._newest: dict[str, WeightSource] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._update_s = dict.fromkeys(agent_names.names, 0.0)
        self._waited_s = dict.fromkeys(agent_names.names, 0.0)
        self.sinks: Mapping[str, MemberWeightSink] = {
            name: MemberWeightSink(name, self.publish_blocking, self.publish)
            for name in agent_names.names
        }
        """Receivers of the learners' weights, by member name."""

    def leave(self, name: str) -> None:
        """Note that a host is lost: it gets no versions, and its peers wait for it no longer."""
        host = self.hosts.pop(name, None)
        if host is not None:
            host.gone.set()

    def open(self, start: Callable[[Coroutine[Any, Any, None], str], asyncio.Task[None]]) -> None:
        """Publish every version from now on, in this loop.

        Args: `start`, starts a task of this name that the caller owns.
        """
        self._loop, self._start = asyncio.get_running_loop(), start

    def close(self) -> None:
        """Store later versions only. A version that is on its way gets no further."""
        self._loop = self._start = None
        for task in self._on_their_way.values():
            task.cancel()

    def publish_blocking(self, newest: WeightSource) -> None:
        """Begin to apply a version of one policy on every host: see `publish`.

        Blocks: call it on the device lane.
        """
        if self._loop is None:
            self._note(newest)
        else:
            asyncio.run_coroutine_threadsafe(self.publish(newest), self._loop).result()

    async def publish(self, newest: WeightSource) -> None:
        """Begin to apply a version of one policy on every host; return once it has left its source.

        Waits for the policy's last version first, if that is still on its way. A later error is that
        of the task, which has an owner: see `open`.

        Raises: WeightsNotGiven, RankFailed, CheckpointError; then no host has applied it.
        """
        if self._start is None:
            # a resume: hosts are brought up later, with the policy's files of these weights; those
            # that are taken over get them from where they are now
            self._note(newest)
            return
        heading, began = newest.heading, time.perf_counter()
        # waits for                           woken by
        # the last version of this policy     the end of its task, whatever it was
        # this one to leave its source        the broadcast, or the end of its task with an error
        if (last := self._on_their_way.get(heading.member)) is not None:
            await asyncio.wait((last,))
        self._coming[heading.member] = heading.version
        self._announced(min(self._coming.values()))
        has_left: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        task = self._start(self._carry(newest, has_left), f"weights {heading.version} to all hosts")
        task.add_done_callback(lambda _: has_left.cancel())  # it may be cancelled before it begins
        self._on_their_way[heading.member] = task
        await has_left
        self._waited_s[heading.member] = time.perf_counter() - began

    async def wait_applied(self) -> None:
        """Wait until every host serves what was published."""
        if self._on_their_way:
            await asyncio.wait(self._on_their_way.values())

    @property
    def has_newest(self) -> bool:
        """Whether the newest versions can be given to a host that has other weights."""
        return all(name in self._newest for name in self._agent_names.names)

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
        # waits for                                  woken by
        # the turns of all policies                  the end of the publications that have them
        # a version that a host or the ranks give    the clock: the ranks' next one is announced to no host
        while True:
            # a version that is published meanwhile would be missed
            async with self._all_turns():
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
        No publication may run meanwhile.

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
            for member in self._agent_names.names
        }

    def metrics(self) -> dict[str, float]:
        """Return seconds of the newest version of each policy.

        `hosts/weights_s` passed until every host served it; the learner waited for
        `hosts/weights_waited_s` of them, or for the version before.
        """
        return {
            f"{self._agent_names.get_prefix(name)}hosts/{key}": seconds[name]
            for key, seconds in (
                ("weights_s", self._update_s),
                ("weights_waited_s", self._waited_s),
            )
            for name in self._agent_names.names
        }

    async def _caught_up(
        self, member: str, name: str, host: WeightHost, held: HeldVersion, *, is_new: bool
    ) -> HeldVersion:
        newest = self._newest.get(member)
        if newest is None:
            return HeldVersion(version=self._versions[member])
        if is_new and held.version == newest.heading.version:
            return held
        digest = await newest.fetch_digest()
        # the same number is not enough: an update that is repeated need not have the same weights
        if digest is not None and held == HeldVersion(
            version=newest.heading.version, digest=digest
        ):
            return held
        stocked = self._stocked.get(member, ())
        having = [each for each in stocked if each in self.hosts and each != name]
        planned = self._reach.planned([name], having)
        broadcast = ChainBroadcast(newest, {**self.hosts, name: host}, self._reach.unreachable)
        for error in (await broadcast.stage(planned)).values():
            raise error
        await host.actor.apply_weights(member)
        self._stocked[member] = (*having, *_holders(planned))
        return HeldVersion(version=newest.heading.version, digest=await newest.fetch_digest() or "")

    @asynccontextmanager
    async def _all_turns(self) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            for turn in self._turns.values():
                await stack.enter_async_context(turn)
            yield

    async def _carry(self, newest: WeightSource, has_left: "asyncio.Future[None]") -> None:
        """Apply a version on every host. An error before it has left is that of `has_left`."""
        began = time.perf_counter()
        try:
            async with self._turns[newest.heading.member]:
                await self._publish(newest, has_left)
        except BaseException as error:
            if has_left.done() or not isinstance(error, Exception):
                has_left.cancel()
                raise
            has_left.set_exception(error)
        else:
            _set_left(has_left)
        self._update_s[newest.heading.member] = time.perf_counter() - began

    async def _publish(self, newest: WeightSource, has_left: "asyncio.Future[None]") -> None:
        member, version = newest.heading.member, newest.heading.version
        before = self._newest.get(member)
        if newest.is_kept:
            _set_left(has_left)
        if before is not None and await newest.is_same_as(before):
            # a policy whose turn it is not, or an update without signal
            _set_left(has_left)
            await self._each(lambda host: host.renew_weights(member, version))
        elif await self._is_staged(newest, has_left):
            await self._each(lambda host: host.apply_weights(member))
        else:
            return
        self._note(newest)

    async def _is_staged(self, newest: WeightSource, has_left: "asyncio.Future[None]") -> bool:
        """Stage a version on every host, and drop those that are gone.

        Return False if a host cannot get it any more, because what had it is gone and the source has
        a newer one: then none may act with it, and all get the newer one.
        """
        hosts = dict(self.hosts)
        planned = self._reach.planned(self._reach.in_order(hosts, newest.machines))
        broadcast = ChainBroadcast(newest, hosts, self._reach.unreachable)
        failed = await broadcast.stage(planned, lambda: _set_left(has_left))
        if has_left.done() and (late := _find_late(failed)):
            # the source may have no more than the newest weights, but a host still has these
            having = [name for name in _holders(planned) if name not in failed]
            again = ChainBroadcast(newest, hosts, self._reach.unreachable)
            found = await again.stage(self._reach.planned(late, having))
            failed = {name: error for name, error in failed.items() if name not in late} | found
            if late := _find_late(failed):
                self._skip(newest, {name: failed.pop(name) for name in late})
                self._drop(failed)
                return False
        self._reach.require_reached(failed, self.hosts)
        self._drop(failed)
        self._stocked[newest.heading.member] = _holders(planned)
        return True

    def _skip(self, newest: WeightSource, late: Mapping[str, BaseException]) -> None:
        """Say which hosts cannot get a version any more; note those that no rank can reach."""
        self._reach.note_not_reached(late)
        logger.warning(
            "weights %d are skipped: %s cannot get them any more (%s), and newer ones follow",
            newest.heading.version,
            ", ".join(late),
            next(iter(late.values())),
        )

    def _note(self, newest: WeightSource) -> None:
        heading = newest.heading
        self._newest[heading.member] = newest
        self._versions[heading.member] = self._coming[heading.member] = heading.version
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


def _find_late(failed: Mapping[str, BaseException]) -> list[str]:
    """Return the hosts that stay, but could not get a version from its source."""
    return [name for name, error in failed.items() if isinstance(error, WeightsNotGiven)]


def _set_left(has_left: "asyncio.Future[None]") -> None:
    if not has_left.done():
        has_left.set_result(None)


def _holders(planned: Sequence[Hop]) -> tuple[str, ...]:
    """Return the hosts that have the bytes in memory of their own."""
    return tuple(each.host for each in planned if not each.opens_memory)
