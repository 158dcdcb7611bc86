"""The interface of deadlines that are learned from earlier calls.

`vla_rl.env_workers.config` implements it.
"""

from typing import Any, Protocol


class CallLimit(Protocol):
    """Sets the deadlines of a method's calls from the durations of earlier calls.

    Its methods must not block.
    """

    def num_units(self, args: tuple[Any, ...]) -> int:
        """Return the work of a call with these arguments, in the limit's own units."""
        ...

    def limit_s(self, num_units: int) -> float | None:
        """Return the longest time for this much work (s); None if too little is known."""
        ...

    def note(self, num_units: int, seconds: float) -> None:
        """Learn from an answered call: its work, and its time without the wait before it."""
        ...

    def note_overdue(self, num_units: int) -> str:
        """Learn from a call that was not answered within `limit_s`.

        Return the reason for that limit, for the error.
        """
        ...
