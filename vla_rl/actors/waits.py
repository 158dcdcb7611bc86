"""Who waits for whom, since when, and when something last moved on.

Anything that waits says so with `waiting`; anything that completes says so with `note_progress`. Both cost about a
microsecond and are read by the `Watchdog` from its own thread, so the tables hold plain values and every access is one
dictionary operation. Actor calls are listed by the runtime itself: nobody needs to wrap them.
"""

import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Wait:
    """One edge of the wait graph: `who` has waited for `on` since `since` (time.monotonic seconds)."""

    who: str
    on: str
    since: float

    def describe(self, now: float) -> str:
        """One line of the wait graph, e.g. `episode 12 waits for env-3 since 4.2 s`."""
        return f"{self.who} waits for {self.on} since {now - self.since:.1f} s"


_waits: dict[int, Wait] = {}
_sources: dict[int, Callable[[], Iterable[Wait]]] = {}
_wait_ids = itertools.count()
_progress_counts: dict[str, int] = {}
_last_progress_s: list[float] = [time.monotonic()]


@contextmanager
def waiting(who: str, on: str) -> Iterator[None]:
    """List `who` as waiting for `on` while the body runs, e.g. `with waiting("episode 12", on="env-3"): await ...`."""
    token = begin_wait(who, on)
    try:
        yield
    finally:
        end_wait(token)


def begin_wait(who: str, on: str) -> int:
    """List a wait whose end is not a `with` block; give the token to `end_wait`."""
    token = next(_wait_ids)
    _waits[token] = Wait(who, on, time.monotonic())
    return token


def end_wait(token: int) -> None:
    """Take a wait off the list; a token that is already off is ignored."""
    _waits.pop(token, None)


def note_progress(what: str, count: int = 1) -> None:
    """Tell the watchdog that something moved on, e.g. `note_progress("episodes")`."""
    _progress_counts[what] = _progress_counts.get(what, 0) + count
    _last_progress_s[0] = time.monotonic()


def add_source(waits: Callable[[], Iterable[Wait]]) -> int:
    """List what `waits` gives as well, asked from any thread; give the token to `remove_source`."""
    token = next(_wait_ids)
    _sources[token] = waits
    return token


def remove_source(token: int) -> None:
    """Stop asking a source."""
    _sources.pop(token, None)


def current_waits() -> list[Wait]:
    """All waits, those for answers of actors included, the longest first. Safe to call from any thread."""
    waits = list(_waits.values())  # one step for other threads, which sorting would not be
    for source in list(_sources.values()):
        waits.extend(source())
    return sorted(waits, key=lambda wait: wait.since)


def progress_counts() -> dict[str, int]:
    """How often each thing was noted since the process began. Safe to call from any thread."""
    return dict(_progress_counts)


def seconds_since_progress() -> float:
    """Time since the last `note_progress` (or since the import of this module)."""
    return time.monotonic() - _last_progress_s[0]
