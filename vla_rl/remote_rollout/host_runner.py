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
    """An `EpisodeRunner` over the players of hosts, which come and go while it runs.

    Args:
        weight_version: version that every host serves that is added.
        drop_shelved: lets pictures on a shelf be dropped; None if there is no shelf.
        kind_of: returns the kind of environment that an episode needs.
    """

    def __init__(
        self,
        weight_version: int,
        drop_shelved: Callable[[ImageCacheRef], None] | None = None,
        kind_of: Callable[[EpisodeSpec], str] = lambda episode: ANY_KIND,
    ) -> None:
        self._weight_version = self._coming_version = weight_version
        self._drop_cached_images, self._kind_of = drop_shelved, kind_of
        self._picture_bytes = {"here": 0, "shelved": 0}
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
        """Slots of all hosts; a host that is slow has fewer than its player offers."""
        return sum(self._pace.all_slots(member) for member in self._members.values())

    @property
    def weight_version(self) -> int:
        """Version that every host serves, or a newer one."""
        return self._weight_version

    @property
    def coming_version(self) -> int:
        """Version that is on its way to every host; `weight_version` if none is."""
        return self._coming_version

    @property
    def asked_s(self) -> float:
        """Seconds in which a policy was asked, over the hosts, as of the last count.

        May be called from any thread.
        """
        return self._asked_s

    def announced(self, version: int) -> None:
        """Report that a version is on its way to every host."""
        self._coming_version = version

    def published(self, version: int) -> None:
        """Report that every host that is here serves this version."""
        self._weight_version = version
        self._coming_version = max(version, self._coming_version)
        self._more_may_begin()

    def add(
        self, host: str, player: EpisodeRunner, slots: Mapping[str, int] = MappingProxyType({})
    ) -> None:
        """Give episodes to a host from now on.

        Args:
            host: its name.
            player: runs episodes there.
            slots: number of its environments of each kind; empty if any suits any episode.

        Raises: ValueError if it is here, or has old weights.
        """
        if host in self._members:
            raise ValueError(f"host {host!r} runs episodes already; remove it first")
        if player.weight_version < self._weight_version:
            raise ValueError(
                f"host {host!r} serves weight version {player.weight_version}, expected at least "
                f"{self._weight_version}; give it the newest weights first"
            )
        self._members[host] = HostLoad(player, slots)
        player.when_more_may_begin(self._more_may_begin)
        self._more_may_begin()

    def remove(self, host: str) -> None:
        """Give a host no more episodes.

        Those that it runs end as its player ends them: with `ActorDied`, if the host is gone.
        """
        member = self._members.pop(host, None)
        if member is not None:
            self._count(member, asyncio.get_running_loop().time())

    async def play(self, episode: EpisodeSpec, *, timeout_s: float | None = None) -> Trajectory:
        """Run `episode` on the freest host; wait while no host has a free slot.

        If it takes far too long there, it begins on a second host too, and the first end counts:
        an update waits for its last episode, so that one slow host would slow down all.

        Raises: EpisodeLost if the host is gone; else as `run_episode`.
        """
        host, member = await self._freest(episode)
        kind = self._kind_of(episode)
        began = asyncio.get_running_loop().time()
        original = asyncio.create_task(self._play_on(host, member, episode, timeout_s))
        # not by the task itself, which may be cancelled before it begins
        original.add_done_callback(lambda _: self._give_back(member, kind))
        copies = [original]
        trajectory: Trajectory | None = None
        try:
            await self._until_overdue(original, member, kind)
            if not original.done():
                copies.append(asyncio.create_task(self._play_beside(host, episode, timeout_s)))
            trajectory = await _wait_for_first(copies)
        finally:
            await self._leave(copies, trajectory)
        if original.cancelled():
            seconds = asyncio.get_running_loop().time() - began
            member.num_overtaken += 1
            member.kinds[kind].note_overtaken(seconds, len(trajectory.steps))
        return trajectory

    async def _play_beside(
        self, host: str, episode: EpisodeSpec, timeout_s: float | None
    ) -> Trajectory:
        """Run on any other host what `host` takes too long for."""
        other, member = await self._freest(episode, besides=host)
        try:
            return await self._play_on(other, member, episode, timeout_s)
        finally:
            self._give_back(member, self._kind_of(episode))

    async def _play_on(
        self, host: str, member: HostLoad, episode: EpisodeSpec, timeout_s: float | None
    ) -> Trajectory:
        clock = asyncio.get_running_loop().time
        began = clock()
        try:
            trajectory = await member.player.play(episode, timeout_s=timeout_s)
        except ActorDied as death:
            # it stays dead: an episode that is run again must not go there once more
            if self._members.get(host) is member:
                self.remove(host)
            kind = "frozen" if isinstance(death, ActorFrozen) else "died"
            what = f"host {host!r} is gone: {death.cause}"
            raise EpisodeLost(episode, kind, what, with_host=True) from death
        seconds, kind = clock() - began, self._kind_of(episode)
        member.num_episodes += 1
        self._pace.note(member, kind, seconds, len(trajectory.steps))
        return trajectory

    async def _leave(
        self, copies: Sequence["asyncio.Task[Trajectory]"], chosen: Trajectory | None
    ) -> None:
        """Cancel the copies that still run, and drop what another one has left on its host."""
        for copy in copies:
            copy.cancel()
        await asyncio.wait(copies)
        for copy in copies:
            if not copy.cancelled() and copy.exception() is None and copy.result() is not chosen:
                self.drop(copy.result())

    async def whole(self, trajectory: Trajectory) -> Trajectory:
        """Return a light trajectory with all its arrays.

        Raises: EpisodeLost if they are gone with their host.
        """
        if trajectory.episode_ref is None:
            return trajectory
        host, episode = trajectory.episode_ref.host, trajectory.episode
        member = self._members.get(host)
        if member is None:
            raise EpisodeLost(episode, "died", f"host {host!r}, which had its arrays, is gone")
        try:
            whole = await member.player.whole(trajectory)
        except ActorDied as death:
            raise EpisodeLost(episode, "died", f"host {host!r} is gone: {death.cause}") from death
        self._picture_bytes["here"] += observed_bytes(whole)
        self._picture_bytes["shelved"] += (
            0 if whole.cached_images is None else whole.cached_images.num_bytes
        )
        return whole

    def drop(self, trajectory: Trajectory) -> None:
        """Let the arrays of a trajectory be dropped where they are, if they are not here."""
        if trajectory.cached_images is not None and self._drop_cached_images is not None:
            self._drop_cached_images(trajectory.cached_images)
        if trajectory.episode_ref is not None:
            member = self._members.get(trajectory.episode_ref.host)
            if member is not None:
                member.player.drop(trajectory)

    def holds(self, trajectory: Trajectory) -> bool:
        """Return whether the host of its arrays was taken over with them."""
        if trajectory.episode_ref is None:
            return True
        member = self._members.get(trajectory.episode_ref.host)
        return member is not None and member.player.holds(trajectory)

    def decisions(self, now: float) -> DecisionCounts:
        """Return the counts of all hosts; seconds are the mean over them."""
        for member in self._members.values():
            self._count(member, now)
        num_waiting = sum(member.counts.num_waiting for member in self._members.values())
        return DecisionCounts(num_waiting, self._num_decisions, self._asked_s)

    def when_more_may_begin(self, call: Callable[[], None]) -> None:
        """Call `call` each time that a host is added, or all have new weights."""
        self._calls.append(call)

    def metrics(self) -> dict[str, float]:
        """Return the number of hosts; slots, episodes and speed of each; the ways of pictures.

        `hosts/NAME/decision_s` begins with the kind, if environments are of several.
        `hosts/picture_bytes_here` came to this process, since the start of the run.
        `hosts/picture_bytes_shelved` went past it, to a shelf beside the learner's ranks.
        """
        metrics = {"hosts/num_playing": float(len(self._members))}
        for way, num_bytes in self._picture_bytes.items():
            metrics[f"hosts/picture_bytes_{way}"] = float(num_bytes)
        for host, member in sorted(self._members.items()):
            metrics[f"hosts/{host}/slots"] = float(self._pace.all_slots(member))
            metrics[f"hosts/{host}/episodes_playing"] = float(member.num_running)
            metrics[f"hosts/{host}/episodes"] = float(member.num_episodes)
            metrics[f"hosts/{host}/episodes_overtaken"] = float(member.num_overtaken)
            for kind, there in member.kinds.items():
                if there.decision_s is not None:
                    name = f"{kind}_decision_s".lstrip("_")
                    metrics[f"hosts/{host}/{name}"] = there.decision_s
        return metrics

    async def _freest(self, episode: EpisodeSpec, besides: str = "") -> tuple[str, HostLoad]:
        """Wait for a slot, and take it; of the hosts that have one, where an episode ends soonest."""
        kind = self._kind_of(episode)
        while True:
            if (freest := self._pace.freest(kind, besides)) is not None:
                freest[1].kinds[kind].num_running += 1
                return freest
            other = "another" if besides else "a"
            with waiting(f"episode {episode.episode_id}", on=f"{other} host with a free slot"):
                await self._changed.wait()

    def _give_back(self, member: HostLoad, kind: str) -> None:
        member.kinds[kind].num_running -= 1
        self._wake()

    async def _until_overdue(
        self, original: "asyncio.Task[Trajectory]", member: HostLoad, kind: str
    ) -> None:
        """Return when an episode has ended, or is overdue, or is on a slow host."""
        clock = asyncio.get_running_loop().time
        began = clock()
        while not (original.done() or self._pace.is_slow(member, kind)):
            overdue_s = self._pace.overdue_s(kind)
            due_s = clock() + _LOOK_EVERY_S if overdue_s is None else began + overdue_s
            left_s = due_s - clock()
            if left_s <= 0.0:
                return
            await asyncio.wait((original,), timeout=left_s)

    def _count(self, member: HostLoad, now: float) -> None:
        """Add what a host has decided since it was last counted, so that a lost one is not forgotten."""
        newest = member.player.decisions(now)
        self._num_decisions += newest.num_decisions - member.counts.num_decisions
        self._asked_s += (newest.asked_s - member.counts.asked_s) / max(len(self._members), 1)
        member.counts = newest

    def _more_may_begin(self) -> None:
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
