"""Episode runners on several hosts as one runner: each episode goes to the host that is freest.

    run_episode(episode) ──► freest host with a free slot ──► its runner ──► Trajectory
                                  ▲ add, remove at any time      ├ the host is gone: EpisodeLost, run again elsewhere
                                                                 └ it is slow: a copy elsewhere, the first end counts

If environments are of several kinds, the freest host is one that has a free environment of the
episode's kind. No process, no socket: what the runner of another host is, is the caller's business.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from vla_rl.errors import ActorDied, ActorFrozen
from vla_rl.remote_rollout.episode_store import observed_bytes
from vla_rl.remote_rollout.host_pace import ANY_KIND, HostLoad, HostPace
from vla_rl.rollout.episode_runner import EpisodeLost, EpisodeRunner
from vla_rl.rollout.policies import DecisionCounts
from vla_rl.types import EpisodeSpec, ImageCacheRef, Trajectory
from vla_rl.util.stalls import waiting

_LOOK_EVERY_S: Final = 1.0
"""Time between two looks at the ended episodes, while they are too few."""


class HostEpisodeRunner:
    """An `EpisodeRunner` over the runners of hosts, which come and go while it runs.

    Args:
        weight_version: version that every host serves that is added.
        drop_images: lets images in an image cache be dropped; None if there is no image cache.
        kind_of: returns the kind of environment that an episode needs.
    """

    def __init__(
        self,
        weight_version: int,
        drop_images: Callable[[ImageCacheRef], None] | None = None,
        kind_of: Callable[[EpisodeSpec], str] = lambda episode: ANY_KIND,
    ) -> None:
        self._weight_version = self._pending_version = weight_version
        self._drop_cached_images, self._kind_of = drop_images, kind_of
        self._image_bytes = {"local": 0, "cached": 0}
        self._members: dict[str, HostLoad] = {}
        self._pace = HostPace(self._members)
        self._changed = asyncio.Event()
        self._calls: list[Callable[[], None]] = []
        self._num_decisions, self._asked_s = 0, 0.0

    @property
    def hosts(self) -> tuple[str, ...]:
        """Names of the hosts that run episodes now."""
        return tuple(self._members)

    @property
    def num_slots(self) -> int:
        """Slots of all hosts; a host that is slow has fewer than its runner offers."""
        return sum(self._pace.all_slots(member) for member in self._members.values())

    @property
    def weight_version(self) -> int:
        """Version that every host serves, or a newer one."""
        return self._weight_version

    @property
    def pending_version(self) -> int:
        """Version that is on its way to every host; `weight_version` if none is."""
        return self._pending_version

    @property
    def asked_s(self) -> float:
        """Seconds in which a policy was asked, over the hosts, as of the last count.

        May be called from any thread.
        """
        return self._asked_s

    def announce_version(self, version: int) -> None:
        """Report that a version is on its way to every host."""
        self._pending_version = version

    def mark_published(self, version: int) -> None:
        """Report that every host that is here serves this version."""
        self._weight_version = version
        self._pending_version = max(version, self._pending_version)
        self._announce_capacity()

    def add_host(
        self, host: str, runner: EpisodeRunner, slots: Mapping[str, int] = MappingProxyType({})
    ) -> None:
        """Give episodes to a host from now on.

        Args:
            host: its name.
            runner: runs episodes there.
            slots: number of its environments of each kind; empty if any suits any episode.

        Raises: ValueError if it is here, or has old weights.
        """
        if host in self._members:
            raise ValueError(f"host {host!r} runs episodes already; remove it first")
        if runner.weight_version < self._weight_version:
            raise ValueError(
                f"host {host!r} serves weight version {runner.weight_version}, expected at least "
                f"{self._weight_version}; give it the newest weights first"
            )
        self._members[host] = HostLoad(runner, slots)
        runner.on_more_capacity(self._announce_capacity)
        self._announce_capacity()

    def remove_host(self, host: str) -> None:
        """Give a host no more episodes.

        Those that it runs end as its runner ends them: with `ActorDied`, if the host is gone.
        """
        member = self._members.pop(host, None)
        if member is not None:
            self._count(member, asyncio.get_running_loop().time())

    async def run_episode(
        self, episode: EpisodeSpec, *, timeout_s: float | None = None
    ) -> Trajectory:
        """Run `episode` on the freest host; wait while no host has a free slot.

        If it takes far too long there, it begins on a second host too, and the first end counts:
        an update waits for its last episode, so that one slow host would slow down all.

        Raises: EpisodeLost if the host is gone; else as `run_episode`.
        """
        host, member = await self._take_slot(episode)
        kind = self._kind_of(episode)
        began = asyncio.get_running_loop().time()
        original = asyncio.create_task(self._run_on(host, member, episode, timeout_s))
        # not by the task itself, which may be cancelled before it begins
        original.add_done_callback(lambda _: self._release_slot(member, kind))
        copies = [original]
        trajectory: Trajectory | None = None
        try:
            await self._until_overdue(original, member, kind)
            if not original.done():
                copies.append(asyncio.create_task(self._run_copy(host, episode, timeout_s)))
            trajectory = await _wait_for_first(copies)
        finally:
            await self._cancel_copies(copies, trajectory)
        if original.cancelled():
            seconds = asyncio.get_running_loop().time() - began
            member.num_overtaken += 1
            member.kinds[kind].record_overtaken(seconds, len(trajectory.steps))
        return trajectory

    async def _run_copy(
        self, host: str, episode: EpisodeSpec, timeout_s: float | None
    ) -> Trajectory:
        """Run on any other host what `host` takes too long for."""
        other, member = await self._take_slot(episode, excluded=host)
        try:
            return await self._run_on(other, member, episode, timeout_s)
        finally:
            self._release_slot(member, self._kind_of(episode))

    async def _run_on(
        self, host: str, member: HostLoad, episode: EpisodeSpec, timeout_s: float | None
    ) -> Trajectory:
        clock = asyncio.get_running_loop().time
        began = clock()
        try:
            trajectory = await member.runner.run_episode(episode, timeout_s=timeout_s)
        except ActorDied as death:
            # it stays dead: an episode that is run again must not go there once more
            if self._members.get(host) is member:
                self.remove_host(host)
            kind = "frozen" if isinstance(death, ActorFrozen) else "died"
            what = f"host {host!r} is gone: {death.cause}"
            raise EpisodeLost(episode, kind, what, with_host=True) from death
        seconds, kind = clock() - began, self._kind_of(episode)
        member.num_episodes += 1
        self._pace.record_episode(member, kind, seconds, len(trajectory.steps))
        return trajectory

    async def _cancel_copies(
        self, copies: Sequence["asyncio.Task[Trajectory]"], chosen: Trajectory | None
    ) -> None:
        """Cancel the copies that still run, and drop what another one has left on its host."""
        for copy in copies:
            copy.cancel()
        await asyncio.wait(copies)
        for copy in copies:
            if not copy.cancelled() and copy.exception() is None and copy.result() is not chosen:
                self.drop_arrays(copy.result())

    async def materialise(self, trajectory: Trajectory) -> Trajectory:
        """Return a metadata-only trajectory with all its arrays.

        Raises: EpisodeLost if they are gone with their host.
        """
        if trajectory.episode_ref is None:
            return trajectory
        host, episode = trajectory.episode_ref.host, trajectory.episode
        member = self._members.get(host)
        if member is None:
            raise EpisodeLost(episode, "died", f"host {host!r}, which had its arrays, is gone")
        try:
            materialised = await member.runner.materialise(trajectory)
        except ActorDied as death:
            raise EpisodeLost(episode, "died", f"host {host!r} is gone: {death.cause}") from death
        self._image_bytes["local"] += observed_bytes(materialised)
        self._image_bytes["cached"] += (
            0 if materialised.cached_images is None else materialised.cached_images.num_bytes
        )
        return materialised

    def drop_arrays(self, trajectory: Trajectory) -> None:
        """Let the arrays of a trajectory be dropped where they are, if they are not here."""
        if trajectory.cached_images is not None and self._drop_cached_images is not None:
            self._drop_cached_images(trajectory.cached_images)
        if trajectory.episode_ref is not None:
            member = self._members.get(trajectory.episode_ref.host)
            if member is not None:
                member.runner.drop_arrays(trajectory)

    def holds_arrays(self, trajectory: Trajectory) -> bool:
        """Return whether the host of its arrays was taken over with them."""
        if trajectory.episode_ref is None:
            return True
        member = self._members.get(trajectory.episode_ref.host)
        return member is not None and member.runner.holds_arrays(trajectory)

    def decisions(self, now: float) -> DecisionCounts:
        """Return the counts of all hosts; seconds are the mean over them."""
        for member in self._members.values():
            self._count(member, now)
        num_waiting = sum(member.counts.num_waiting for member in self._members.values())
        return DecisionCounts(num_waiting, self._num_decisions, self._asked_s)

    def on_more_capacity(self, call: Callable[[], None]) -> None:
        """Call `call` each time that a host is added, or all have new weights."""
        self._calls.append(call)

    def metrics(self) -> dict[str, float]:
        """Return the number of hosts; slots, episodes and speed of each; the ways of images.

        `hosts/NAME/decision_s` begins with the kind, if environments are of several.
        `hosts/image_bytes_local` came to this process, since the start of the run.
        `hosts/image_bytes_cached` went past it, to an image cache beside the learner's ranks.
        """
        metrics = {"hosts/num_running": float(len(self._members))}
        for way, num_bytes in self._image_bytes.items():
            metrics[f"hosts/image_bytes_{way}"] = float(num_bytes)
        for host, member in sorted(self._members.items()):
            metrics[f"hosts/{host}/slots"] = float(self._pace.all_slots(member))
            metrics[f"hosts/{host}/episodes_running"] = float(member.num_running)
            metrics[f"hosts/{host}/episodes"] = float(member.num_episodes)
            metrics[f"hosts/{host}/episodes_overtaken"] = float(member.num_overtaken)
            for kind, there in member.kinds.items():
                if there.decision_s is not None:
                    name = f"{kind}_decision_s".lstrip("_")
                    metrics[f"hosts/{host}/{name}"] = there.decision_s
        return metrics

    async def _take_slot(self, episode: EpisodeSpec, excluded: str = "") -> tuple[str, HostLoad]:
        """Wait for a slot, and take it; of the hosts that have one, where an episode ends soonest."""
        kind = self._kind_of(episode)
        # waits for: a free slot    woken by: the end of an episode, and a host that comes or goes
        while True:
            if (freest := self._pace.find_freest(kind, excluded)) is not None:
                freest[1].kinds[kind].num_running += 1
                return freest
            other = "another" if excluded else "a"
            with waiting(f"episode {episode.episode_id}", on=f"{other} host with a free slot"):
                await self._changed.wait()

    def _release_slot(self, member: HostLoad, kind: str) -> None:
        member.kinds[kind].num_running -= 1
        self._wake()

    async def _until_overdue(
        self, original: "asyncio.Task[Trajectory]", member: HostLoad, kind: str
    ) -> None:
        """Return when an episode has ended, or is overdue, or is on a slow host."""
        clock = asyncio.get_running_loop().time
        began = clock()
        # waits for                             woken by
        # the episode                           its end, or its loss with its host
        # the time at which it is overdue       the clock, also to look whether the host has become slow
        while not (original.done() or self._pace.is_slow(member, kind)):
            overdue_s = self._pace.overdue_s(kind)
            due_s = clock() + _LOOK_EVERY_S if overdue_s is None else began + overdue_s
            left_s = due_s - clock()
            if left_s <= 0.0:
                return
            await asyncio.wait((original,), timeout=left_s)

    def _count(self, member: HostLoad, now: float) -> None:
        """Add what a host has decided since it was last counted, so that a lost one is not forgotten."""
        newest = member.runner.decisions(now)
        self._num_decisions += newest.num_decisions - member.counts.num_decisions
        self._asked_s += (newest.asked_s - member.counts.asked_s) / max(len(self._members), 1)
        member.counts = newest

    def _announce_capacity(self) -> None:
        self._wake()
        for call in self._calls:
            call()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


async def _wait_for_first(copies: Sequence["asyncio.Task[Trajectory]"]) -> Trajectory:
    """Return the first trajectory. Raises: the last EpisodeLost, or the first other error."""
    running = set(copies)
    while True:
        done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        for copy in done:
            error = copy.exception()
            if error is None:
                return copy.result()
            if not running or not isinstance(error, EpisodeLost):
                raise error
