"""One of several hosts that run episodes: its player, what it runs, and how fast it is."""

from collections.abc import Mapping
from typing import Final

from vla_rl.rollout.player import EpisodePlayer
from vla_rl.rollout.policies import DecisionCounts

ANY_KIND: Final = ""
"""Kind of all episodes, if any slot suits any of them."""

_MEMORY: Final = 0.2
"""Weight of the newest episode in a host's seconds for a decision."""


class KindThere:
    """The episodes of one kind on one host.

    Kinds are timed apart: a decision of one may take a hundred times as long as one of another.

    Attributes:
        num_running: episodes that have a slot there.
        decision_s: seconds of a decision; None before the first episode has ended.
    """

    def __init__(self) -> None:
        self.num_running = 0
        self.decision_s: float | None = None

    def note(self, seconds: float, num_decisions: int) -> None:
        """Note an episode that the host ran to its end."""
        newest = seconds / max(num_decisions, 1)
        before = newest if self.decision_s is None else self.decision_s
        self.decision_s = before + _MEMORY * (newest - before)

    def note_overtaken(self, seconds: float, num_decisions: int) -> None:
        """Note an episode that a second host ended first, after so long here."""
        # a lower bound: it says nothing of a host that is known to be slower
        least = seconds / max(num_decisions, 1)
        if self.decision_s is None or least > self.decision_s:
            self.decision_s = least


class PlayingHost:
    """One host.

    Args:
        player: runs episodes there.
        slots: number of slots for each kind of episodes; empty if any slot suits any episode.

    Attributes:
        player: that player.
        kinds: what runs there, by kind.
        num_episodes: episodes that ended there.
        num_overtaken: episodes that a second host ended first.
        counts: decisions, as of the last count.
    """

    def __init__(self, player: EpisodePlayer, slots: Mapping[str, int]) -> None:
        self.player, self._slots = player, dict(slots)
        self.kinds = {kind: KindThere() for kind in slots or (ANY_KIND,)}
        self.num_episodes = self.num_overtaken = 0
        self.counts = DecisionCounts(0, 0, 0.0)

    @property
    def num_running(self) -> int:
        """Number of episodes that have a slot there."""
        return sum(kind.num_running for kind in self.kinds.values())

    def num_slots(self, kind: str) -> int:
        """Return the number of slots for episodes of a kind."""
        return self._slots[kind] if self._slots else self.player.num_slots
