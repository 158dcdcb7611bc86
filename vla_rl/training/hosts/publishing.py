"""The newest weights to every host: all of them stage a version, then all of them apply it.

    adopt (device lane) ─► copy ─► stage on each host, beside running episodes ─► apply on each
    a host that is away meanwhile gets the newest version before it runs episodes again

A host that fails is dropped, and the others go on. Publications and hosts that join take turns, so
that no host can miss a version.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable

from torch import nn

from vla_rl.errors import ActorDied
from vla_rl.training.hosts.flat_weights import FlatWeights, flattened
from vla_rl.training.hosts.messages import HostStatus, WeightHeading
from vla_rl.training.hosts.rollout_host import RolloutHost


class HostWeights:
    """A `WeightSink` whose weights act on other hosts.

    Args:
        weight_version: version that hosts are brought up with.
        lost: called with a host's name and the cause if it did not take a version.
        published: called with the version that all hosts serve now.
    """

    def __init__(
        self,
        weight_version: int,
        lost: Callable[[str, ActorDied], None],
        published: Callable[[int], None],
    ) -> None:
        self.turn = asyncio.Lock()
        """Held by a publication, and by a host while it joins."""

        self.hosts: dict[str, RolloutHost] = {}
        """The hosts that get new versions, by name."""

        self._lost, self._published = lost, published
        self._weight_version = weight_version
        self._newest: FlatWeights | None = None
        self._nothing = nn.Module()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._update_s = 0.0

    @property
    def network(self) -> nn.Module:
        """None: the weights that act are on other hosts, and never the learner's own."""
        return self._nothing

    def open(self) -> None:
        """Publish every version from now on, in this loop."""
        self._loop = asyncio.get_running_loop()

    def close(self) -> None:
        """Store later versions only."""
        self._loop = None

    def adopt(self, network: nn.Module, weight_version: int) -> None:
        """Apply weights and their version on every host. Call it on the device lane.

        The lane waits for it, so that no update begins before all hosts have the weights of the
        last one.
        """
        if self._loop is None:
            # a resume: hosts are brought up later, with the policy's files of these weights; those
            # that are taken over get them from here
            self._newest, self._weight_version = flattened(network, weight_version), weight_version
            self._published(weight_version)
            return
        newest = flattened(network, weight_version)
        asyncio.run_coroutine_threadsafe(self._publish(newest), self._loop).result()

    @property
    def has_newest(self) -> bool:
        """Whether the newest version can be given to a host that has other weights."""
        return self._newest is not None

    async def catch_up(self, host: RolloutHost, status: HostStatus, *, is_new: bool) -> int:
        """Give a host that joins the newest version, unless it has it; return its version.

        Hold `turn`.

        Args:
            host: the actor there.
            status: what it offers.
            is_new: whether it has read the policy's files of this run just now.

        Raises: ActorDied; CheckpointError.
        """
        newest = self._newest
        if newest is None or (is_new and status.weight_version == newest.version):
            return self._weight_version
        heading = await asyncio.to_thread(newest.heading)
        # the same number is not enough: an update that is repeated need not have the same weights
        if (status.weight_version, status.weights_digest) == (heading.version, heading.digest):
            return newest.version
        await _stage(host, newest, heading)
        return await host.apply_weights()

    def metrics(self) -> dict[str, float]:
        """Return the seconds that the newest version took to every host."""
        return {"hosts/weights_s": self._update_s}

    async def _publish(self, newest: FlatWeights) -> None:
        began = time.perf_counter()
        async with self.turn:
            heading = await asyncio.to_thread(newest.heading)
            await self._each(self.hosts.items(), lambda host: _stage(host, newest, heading))
            await self._each(self.hosts.items(), lambda host: host.apply_weights())
            self._newest, self._weight_version = newest, newest.version
            self._published(newest.version)
        self._update_s = time.perf_counter() - began

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


async def _stage(host: RolloutHost, weights: FlatWeights, heading: WeightHeading) -> None:
    await host.begin_weights(heading)
    for start, piece in weights.pieces():
        await host.put_weights(start, piece)
    await host.check_weights()
