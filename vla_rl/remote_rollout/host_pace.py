"""The pace of hosts in comparison, which decides where the next episode goes.

    ended episodes ─► seconds of a decision, by host and kind ─► slots; where an episode ends soonest
                  └─► longest of the last ones ─────────────────► when one is overdue

Decisions only: no task and no clock.
"""

import statistics
from collections import defaultdict, deque
from collections.abc import Mapping
from typing import Final

from vla_rl.rollout.episode_runner import EpisodeRunner
from vla_rl.rollout.policies import DecisionCounts

ANY_KIND: Final = ""
"""Kind of all episodes, if any slot suits any of them."""

_NEWEST_WEIGHT: Final = 0.2
"""Weight of the newest episode in a host's seconds for a decision."""


class KindLoad:
    """The episodes of one kind on one host.

    Kinds are timed apart: a decision of one may take a hundred times as long as one of another.

    Attributes:
        num_running: episodes that have a slot there.
        decision_s: seconds of a decision; None before the first episode has ended.
    """

    def __init__(self) -> None:
        self.num_running = 0
        self.decision_s: float | None = None

    def record_episode(self, seconds: float, num_decisions: int) -> None:
        """Note an episode that the host ran to its end."""
        newest = seconds / max(num_decisions, 1)
        before = newest if self.decision_s is None else self.decision_s
        self.decision_s = before + _NEWEST_WEIGHT * (newest - before)

    def record_overtaken(self, seconds: float, num_decisions: int) -> None:
        """Note an episode that a second host ended first, after so long here."""
        # a lower bound: it says nothing of a host that is known to be slower
        least = seconds / max(num_decisions, 1)
        if self.decision_s is None or least > self.decision_s:
            self.decision_s = least


class HostLoad:
    """One host.

    Args:
        runner: runs episodes there.
        slots: number of slots for each kind of episodes; empty if any slot suits any episode.

    Attributes:
        player: that runner.
        kinds: what runs there, by kind.
        num_episodes: episodes that ended there.
        num_overtaken: episodes that a second host ended first.
        counts: decisions, as of the last count.
    """

    def __init__(self, runner: EpisodeRunner, slots: Mapping[str, int]) -> None:
        self.runner, self._slots = runner, dict(slots)
        self.kinds = {kind: KindLoad() for kind in slots or (ANY_KIND,)}
        self.num_episodes = self.num_overtaken = 0
        self.counts = DecisionCounts(0, 0, 0.0)

    @property
    def num_running(self) -> int:
        """Number of episodes that have a slot there."""
        return sum(kind.num_running for kind in self.kinds.values())

    def count_slots(self, kind: str) -> int:
        """Return the number of slots for episodes of a kind."""
        return self._slots[kind] if self._slots else self.runner.num_slots


SLOW: Final = 3.0
"""A host gets fewer episodes if a decision takes this many times as long there as on the median host.
Below it, a full host and an idle one of the same kind differ by as much."""

OVERDUE: Final = 1.5
"""An episode begins on a second host too after this many times the longest of the last episodes. An
average would not do: of lengths from 1 to 64 decisions, a third is twice as long as it."""

_MIN_EPISODES, _MAX_EPISODES = 16, 100
"""Episodes of which the longest is taken. The first to end are short ones."""


class HostPace:
    """Compares the hosts that run episodes.

    Args: `members`, the live table of these hosts, by name.
    """

    def __init__(self, members: Mapping[str, HostLoad]) -> None:
        self._members = members
        self._ended_s: defaultdict[str, deque[float]] = defaultdict(
            lambda: deque(maxlen=_MAX_EPISODES)
        )

    def record_episode(
        self, member: HostLoad, kind: str, seconds: float, num_decisions: int
    ) -> None:
        """Note an episode that a host ran to its end."""
        member.kinds[kind].record_episode(seconds, num_decisions)
        if not self.is_slow(member, kind):
            self._ended_s[kind].append(seconds)

    def find_freest(self, kind: str, excluded: str = "") -> tuple[str, HostLoad] | None:
        """Return the host where an episode ends soonest, and its name; None if no slot is free.

        Args: `excluded`, a host that is left out.
        """
        free = [
            (host, member)
            for host, member in self._members.items()
            if host != excluded and member.kinds[kind].num_running < self.slots(member, kind)
        ]
        return min(free, key=lambda each: self._expected(each[1], kind), default=None)

    def slots(self, member: HostLoad, kind: str) -> int:
        """Return a host's slots for a kind: in proportion to its speed, if it is slow."""
        num_slots, there = member.count_slots(kind), member.kinds[kind]
        if there.decision_s is None or not self.is_slow(member, kind):
            return num_slots
        # one stays, so that a host that recovers is noticed
        return max(1, int(num_slots * self._median_s(kind) / there.decision_s))

    def all_slots(self, member: HostLoad) -> int:
        """Return a host's slots for all kinds."""
        return sum(self.slots(member, kind) for kind in member.kinds)

    def is_slow(self, member: HostLoad, kind: str) -> bool:
        """Return whether a host is slow with episodes of a kind."""
        decision_s = member.kinds[kind].decision_s
        return decision_s is not None and decision_s > SLOW * self._median_s(kind)

    def overdue_s(self, kind: str) -> float | None:
        """Return the seconds after which an episode is overdue; None if too few have ended."""
        ended_s = self._ended_s[kind]
        return OVERDUE * max(ended_s) if len(ended_s) >= _MIN_EPISODES else None

    def _expected(self, member: HostLoad, kind: str) -> float:
        """Return how long an episode would take there, in comparison with other hosts."""
        there = member.kinds[kind]
        pace = self._median_s(kind) if there.decision_s is None else there.decision_s
        # episodes of all kinds share the engines there
        return pace * (member.num_running + 1) / self.all_slots(member)

    def _median_s(self, kind: str) -> float:
        # the lower one of two: with two hosts, the fast one is the measure
        all_of = (member.kinds[kind].decision_s for member in self._members.values())
        known = [decision_s for decision_s in all_of if decision_s is not None]
        return statistics.median_low(known) if known else 1.0
