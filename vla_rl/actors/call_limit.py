"""Deadlines that follow from the calls before: what a client asks, and `vla_rl.simulation.learned_timeout` answers."""

from typing import Any, Protocol


class CallLimit(Protocol):
    """Sets the deadlines of an endpoint's calls by how long earlier ones took. Its methods answer at once."""

    def num_units(self, args: tuple[Any, ...]) -> int:
        """How much work a call with these arguments is, in units of its own."""
        ...

    def limit_s(self, num_units: int) -> float | None:
        """Longest time for so much work (s); None if too little is known."""
        ...

    def note(self, num_units: int, seconds: float) -> None:
        """Learn from a call that was answered: its work, and its time without the wait behind other calls."""
        ...

    def note_overdue(self, num_units: int) -> str:
        """Learn from a call that was not answered within `limit_s`; gives the reason for that limit, for the error."""
        ...
