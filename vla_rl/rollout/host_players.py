"""Players on several hosts as one player: each episode goes to the host that is freest.

    play(episode) ──► freest host with a free slot ──► its player ──► Trajectory
                           ▲ add, remove at any time      └ the host is gone: EpisodeLost, run again elsewhere

No process, no socket: what a player of another host is, is the caller's business.
"""

import asyncio
import statistics
from collections.abc import Callable
from typing import Final

from vla_rl.actors.waits import waiting
from vla_rl.errors import ActorDied, ActorFrozen
from vla_rl.rollout.player import EpisodePlayer
from vla_rl.rollout.playing import EpisodeLost
from vla_rl.rollout.policies import DecisionCounts
from vla_rl.types import EpisodeSpec, Trajectory

SLOW: Final = 3.0
"""A host gets fewer episodes if a decision takes this many times as long there as on the median host.
Below it, a full host and an idle one of the same kind differ by as much."""

_MEMORY: Final = 0.2
"""Weight of the newest episode in a host's seconds for a decision."""


class _Member:
    """One host: its player, and how fast it is."""

    def __init__(self, player: EpisodePlayer) -> None:
        self.player = player
        self.num_running = self.num_episodes = 0
        self.decision_s: float | None = None
        self.counts = DecisionCounts(0, 0, 0.0)

    def note(self, seconds: float, num_decisions: int) -> None:
        """Note an episode that this host ran to its end."""
        self.num_episodes += 1
        newest = seconds / max(num_decisions, 1)
        before = newest if self.decision_s is None else self.decision_s
        self.decision_s = before + _MEMORY * (newest - before)


class HostPlayers:
    """An `EpisodePlayer` over the players of hosts, which come and go while it runs.

    Args:
        weight_version: version that every host serves that is added.
    """

    def __init__(self, weight_version: int) -> None:
        self._weight_version = weight_version
        self._members: dict[str, _Member] = {}
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
        return sum(self._slots(member) for member in self._members.values())

    @property
    def weight_version(self) -> int:
        """Version that every host serves, or a newer one."""
        return self._weight_version

    @property
    def asked_s(self) -> float:
        """Seconds in which a policy was asked, over the hosts, as of the last count.

        May be called from any thread.
        """
        return self._asked_s

    def published(self, version: int) -> None:
        """Report that every host that is here serves this version."""
        self._weight_version = version

    def add(self, host: str, player: EpisodePlayer) -> None:
        """Give episodes to a host from now on. Raises: ValueError if it is here, or has old weights."""
        if host in self._members:
            raise ValueError(f"host {host!r} runs episodes already; remove it first")
        if player.weight_version < self._weight_version:
            raise ValueError(
                f"host {host!r} serves weight version {player.weight_version}, expected at least "
                f"{self._weight_version}; give it the newest weights first"
            )
        self._members[host] = _Member(player)
        player.when_slots_come(self._slots_came)
        self._slots_came()

    def remove(self, host: str) -> None:
        """Give a host no more episodes.

        Those that it runs end as its player ends them: with `ActorDied`, if the host is gone.
        """
        member = self._members.pop(host, None)
        if member is not None:
            self._count(member, asyncio.get_running_loop().time())

    async def play(self, episode: EpisodeSpec, *, timeout_s: float | None = None) -> Trajectory:
        """Run `episode` on the freest host; wait while no host has a free slot.

        Raises: EpisodeLost if the host is gone; else as `play_episode`.
        """
        host, member = await self._freest(episode)
        clock = asyncio.get_running_loop().time
        began = clock()
        member.num_running += 1
        try:
            trajectory = await member.player.play(episode, timeout_s=timeout_s)
        except ActorDied as death:
            # it stays dead: an episode that is run again must not use up its attempts there
            if self._members.get(host) is member:
                self.remove(host)
            kind = "frozen" if isinstance(death, ActorFrozen) else "died"
            raise EpisodeLost(episode, kind, f"host {host!r} is gone: {death.cause}") from death
        finally:
            member.num_running -= 1
            self._wake()
        member.note(clock() - began, len(trajectory.steps))
        return trajectory

    async def whole(self, trajectory: Trajectory) -> Trajectory:
        """Return a light trajectory with all its arrays.

        Raises: EpisodeLost if they are gone with their host.
        """
        if trajectory.deposit is None:
            return trajectory
        host, episode = trajectory.deposit.host, trajectory.episode
        member = self._members.get(host)
        if member is None:
            raise EpisodeLost(episode, "died", f"host {host!r}, which had its arrays, is gone")
        try:
            return await member.player.whole(trajectory)
        except ActorDied as death:
            raise EpisodeLost(episode, "died", f"host {host!r} is gone: {death.cause}") from death

    def drop(self, trajectory: Trajectory) -> None:
        """Let the arrays of a light trajectory be dropped where they are."""
        if trajectory.deposit is not None:
            member = self._members.get(trajectory.deposit.host)
            if member is not None:
                member.player.drop(trajectory)

    def decisions(self, now: float) -> DecisionCounts:
        """Return the counts of all hosts; seconds are the mean over them."""
        for member in self._members.values():
            self._count(member, now)
        num_waiting = sum(member.counts.num_waiting for member in self._members.values())
        return DecisionCounts(num_waiting, self._num_decisions, self._asked_s)

    def when_slots_come(self, call: Callable[[], None]) -> None:
        """Call `call` each time that a host is added."""
        self._calls.append(call)

    def metrics(self) -> dict[str, float]:
        """Return the number of hosts, and slots, episodes and speed of each."""
        metrics = {"hosts/num_playing": float(len(self._members))}
        for host, member in sorted(self._members.items()):
            metrics[f"hosts/{host}/slots"] = float(self._slots(member))
            metrics[f"hosts/{host}/episodes_playing"] = float(member.num_running)
            metrics[f"hosts/{host}/episodes"] = float(member.num_episodes)
            if member.decision_s is not None:
                metrics[f"hosts/{host}/decision_s"] = member.decision_s
        return metrics

    async def _freest(self, episode: EpisodeSpec) -> tuple[str, _Member]:
        """Wait for a free slot; of the hosts that have one, return where an episode ends soonest."""
        while True:
            free = [
                (host, member)
                for host, member in self._members.items()
                if member.num_running < self._slots(member)
            ]
            if free:
                return min(free, key=lambda each: self._expected(each[1]))
            with waiting(f"episode {episode.episode_id}", on="a host with a free slot"):
                await self._changed.wait()

    def _expected(self, member: _Member) -> float:
        """Return how long an episode would take there, in comparison with other hosts."""
        pace = self._median_s() if member.decision_s is None else member.decision_s
        return pace * (member.num_running + 1) / self._slots(member)

    def _slots(self, member: _Member) -> int:
        """Return a host's slots: in proportion to its speed, if it is slow."""
        num_slots, median = member.player.num_slots, self._median_s()
        if member.decision_s is None or member.decision_s <= SLOW * median:
            return num_slots
        # one stays, so that a host that recovers is noticed
        return max(1, int(num_slots * median / member.decision_s))

    def _median_s(self) -> float:
        # the lower one of two: with two hosts, the fast one is the measure
        known = [each.decision_s for each in self._members.values() if each.decision_s is not None]
        return statistics.median_low(known) if known else 1.0

    def _count(self, member: _Member, now: float) -> None:
        """Add what a host has decided since it was last counted, so that a lost one is not forgotten."""
        newest = member.player.decisions(now)
        self._num_decisions += newest.num_decisions - member.counts.num_decisions
        self._asked_s += (newest.asked_s - member.counts.asked_s) / max(len(self._members), 1)
        member.counts = newest

    def _slots_came(self) -> None:
        self._wake()
        for call in self._calls:
            call()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
