"""Conservation of episodes.

dispatched = trained + filtered + dropped (by cause) + in flight + buffered.

The ledger counts the flows. Episodes in flight and buffered are counted where they are held, at the
moment of the check, so that an episode that is lost or held twice is detected.
"""

import msgspec

from vla_rl.errors import ConservationError


class LedgerState(msgspec.Struct, frozen=True, kw_only=True):
    """All flows since the run began, in episodes."""

    dispatched: int = 0
    trained: int = 0
    filtered: int = 0
    dropped: dict[str, int] = {}


class EpisodeLedger:
    """Counts every episode once when it is dispatched and once when it leaves."""

    def __init__(self, state: LedgerState | None = None) -> None:
        state = state if state is not None else LedgerState()
        self.num_dispatched, self.num_trained, self.num_filtered = (
            state.dispatched,
            state.trained,
            state.filtered,
        )
        self.dropped: dict[str, int] = dict(state.dropped)

    def dispatch(self, num_episodes: int) -> None:
        """Count the episodes of a group that was admitted.

        Another attempt at a lost episode is the same episode.
        """
        self.num_dispatched += num_episodes

    def train(self, num_episodes: int) -> None:
        """Count episodes that an update was trained on."""
        self.num_trained += num_episodes

    def filter(self, num_episodes: int) -> None:
        """Count the episodes of a group that was run and not kept."""
        self.num_filtered += num_episodes

    def drop(self, num_episodes: int, cause: str) -> None:
        """Count episodes that were dropped, by cause, such as `"stale"`."""
        self.dropped[cause] = self.dropped.get(cause, 0) + num_episodes

    def check(self, *, in_flight: int, buffered: int) -> None:
        """Raise ConservationError unless every dispatched episode is in exactly one place.

        The error has the table.
        """
        accounted = (
            self.num_trained + self.num_filtered + sum(self.dropped.values()) + in_flight + buffered
        )
        if accounted != self.num_dispatched:
            raise ConservationError(
                f"{self.num_dispatched} episodes were dispatched, {accounted} are accounted for:\n"
                + self.table(in_flight=in_flight, buffered=buffered)
            )

    def table(self, *, in_flight: int, buffered: int) -> str:
        """Return the counts of the dispatched episodes by where they are, one line each."""
        rows = {
            "dispatched": self.num_dispatched,
            "trained": self.num_trained,
            "filtered": self.num_filtered,
            **{f"dropped ({cause})": count for cause, count in sorted(self.dropped.items())},
            "in flight": in_flight,
            "buffered": buffered,
        }
        return "\n".join(f"    {name:<24}{count:>10}" for name, count in rows.items())

    def state(self) -> LedgerState:
        """Return all flows so far."""
        return LedgerState(
            dispatched=self.num_dispatched,
            trained=self.num_trained,
            filtered=self.num_filtered,
            dropped=dict(self.dropped),
        )
