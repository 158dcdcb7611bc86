"""The wait graph: which task waits for what and since when, and the time of the last progress.

Waiting code calls `waiting`; code that completes work calls `note_progress`. Both cost about a
microsecond. The `Watchdog` reads them from its own thread, so the tables hold plain values and each
access is one dictionary operation. The runtime itself lists calls of actors: they need no
`waiting`.
"""

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Wait:
    """One edge of the wait graph: `who` has waited for `on` since `since`.

    `since` is in seconds of time.monotonic.
    """

    who: str
    on: str
    since: float
    pid: int = 0
    """Process on this host that has to answer; 0 if it is none, or not known."""

    def describe(self, now: float) -> str:
        """Return one line of the wait graph, e.g. `episode 12 waits for env-3 since 4.2 s`."""
        return f"{self.who} waits for {self.on} since {now - self.since:.1f} s"


@dataclass(frozen=True, slots=True)
class NotedDeath:
    """The end of a process or host that was not requested, at `at` of time.monotonic."""

    what: str
    at: float


MOST_DEATHS: Final = 20

_waits: dict[int, Wait] = {}
_deaths: deque[NotedDeath] = deque(maxlen=MOST_DEATHS)
_sources: dict[int, Callable[[], Iterable[Wait]]] = {}
_wait_ids = itertools.count()
_progress_counts: dict[str, int] = {}
_last_progress_s: list[float] = [time.monotonic()]


@contextmanager
def waiting(who: str, on: str) -> Iterator[None]:
    """List `who` as waiting for `on` while the body runs, e.g.
    `with waiting("episode 12", on="env-3"): await ...`.
    """
    token = begin_wait(who, on)
    try:
        yield
    finally:
        end_wait(token)


def begin_wait(who: str, on: str) -> int:
    """List a wait that is not a `with` block; pass the returned token to `end_wait`."""
    token = next(_wait_ids)
    _waits[token] = Wait(who, on, time.monotonic())
    return token


def end_wait(token: int) -> None:
    """Take a wait off the list; a token that is no longer listed is ignored."""
    _waits.pop(token, None)


def note_progress(what: str, count: int = 1) -> None:
    """Report progress to the watchdog, e.g. `note_progress("episodes")`."""
    _progress_counts[what] = _progress_counts.get(what, 0) + count
    _last_progress_s[0] = time.monotonic()


def note_death(what: str) -> None:
    """Remember an unexpected end with its last words; the last 20 are kept."""
    _deaths.append(NotedDeath(what, time.monotonic()))


def recent_deaths() -> list[NotedDeath]:
    """Return the last unexpected ends, the newest last. Safe to call from any thread."""
    return list(_deaths)


def add_source(waits: Callable[[], Iterable[Wait]]) -> int:
    """Also list the waits that `waits` returns, called from any thread.

    Pass the returned token to `remove_source`.
    """
    token = next(_wait_ids)
    _sources[token] = waits
    return token


def remove_source(token: int) -> None:
    """Stop calling a source."""
    _sources.pop(token, None)


def current_waits() -> list[Wait]:
    """Return all waits, including those for answers of actors, longest first.

    Safe to call from any thread.
    """
    waits = list(_waits.values())  # atomic for other threads, which sorting would not be
    for source in list(_sources.values()):
        waits.extend(source())
    return sorted(waits, key=lambda wait: wait.since)


def progress_counts() -> dict[str, int]:
    """Return the progress counts since the process began. Safe to call from any thread."""
    return dict(_progress_counts)


def seconds_since_progress() -> float:
    """Return the time since the last `note_progress`, or since the import of this module (s)."""
    return time.monotonic() - _last_progress_s[0]
