"""How often an episode that is lost is run again."""

from collections import Counter
from typing import Final

from vla_rl.rollout.playing import EpisodeLost

MOST_HOST_LOSSES: Final = 10
"""Times an episode may be lost with its host. A host that goes takes along all its episodes, and is no
fault of theirs: machines that are lent by the hour go often. But one episode may be what ends them."""


class Attempts:
    """Counts the losses of the episodes that run.

    Args:
        max_attempts: times an episode is started, at most, on hosts that stay.
    """

    def __init__(self, max_attempts: int) -> None:
        self._max_attempts = max_attempts
        self._lost: Counter[tuple[int, bool]] = Counter()

    def allow(self, loss: EpisodeLost) -> bool:
        """Count a loss; return whether the episode is to be run again. If not, the loss says why."""
        key = loss.episode.episode_id, loss.with_host
        self._lost[key] += 1
        if loss.with_host and self._lost[key] >= MOST_HOST_LOSSES:
            loss.add_note(
                f"{MOST_HOST_LOSSES} hosts were lost while they ran it, so it may be what ends them"
            )
            return False
        if not loss.with_host and self._lost[key] >= self._max_attempts:
            loss.add_note(f"that was the last of max_attempts={self._max_attempts}")
            return False
        return True

    def ended(self, episode_id: int) -> None:
        """Forget an episode that ran to its end."""
        for with_host in (False, True):
            del self._lost[episode_id, with_host]
