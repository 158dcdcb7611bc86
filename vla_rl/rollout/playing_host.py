"""One of several hosts that run episodes: its player, what it runs, and how fast it is."""

from typing import Final

from vla_rl.rollout.player import EpisodePlayer
from vla_rl.rollout.policies import DecisionCounts

_MEMORY: Final = 0.2
"""Weight of the newest episode in a host's seconds for a decision."""


class PlayingHost:
    """One host.

    Attributes:
        num_running: episodes that have a slot there.
        num_episodes: episodes that ended there.
        num_overtaken: episodes that a second host ended first.
        decision_s: seconds of a decision; None before the first episode has ended.
        counts: decisions, as of the last count.
    """

    def __init__(self, player: EpisodePlayer) -> None:
        self.player = player
        self.num_running = self.num_episodes = self.num_overtaken = 0
        self.decision_s: float | None = None
        self.counts = DecisionCounts(0, 0, 0.0)

    def note(self, seconds: float, num_decisions: int) -> None:
        """Note an episode that this host ran to its end."""
        self.num_episodes += 1
        newest = seconds / max(num_decisions, 1)
        before = newest if self.decision_s is None else self.decision_s
        self.decision_s = before + _MEMORY * (newest - before)

    def note_overtaken(self, seconds: float, num_decisions: int) -> None:
        """Note an episode that a second host ended first, after so long here."""
        self.num_overtaken += 1
        # a lower bound: it says nothing of a host that is known to be slower
        least = seconds / max(num_decisions, 1)
        if self.decision_s is None or least > self.decision_s:
            self.decision_s = least
