"""Comparison of two traces: the first value at which they differ, with both values and a hint."""

from typing import Final

import msgspec
import numpy as np

from vla_rl.errors import DataError
from vla_rl.evaluation.parity.boundaries import BOUNDARIES, Boundary
from vla_rl.evaluation.parity.hints import hint
from vla_rl.evaluation.parity.trace import Trace, TraceEntry, Value

_SHOWN: Final = 8
"""Numbers of an array that a difference shows."""


class Difference(msgspec.Struct, frozen=True):
    """The first value at which two traces differ."""

    boundary: Boundary
    decision: int
    key: str

    values: tuple[str, str]
    """Both values, shortened around the first number that differs."""

    size: str
    """How far they are apart."""

    hint: str | None
    """A change of one value that makes it the other, such as "turned by 180 degrees"; None if none
    of the known ones does."""


class Comparison(msgspec.Struct, frozen=True):
    """Result of a comparison."""

    difference: Difference | None
    """None if all compared values are equal."""

    num_decisions: int
    """Decisions of which every value was equal."""

    compared: dict[str, int]
    """Number of equal values by boundary, in the order of an episode."""

    only_in_one: dict[str, int]
    """Boundaries that only one trace records, with the number (0 or 1) of that trace."""

    largest: dict[str, float]
    """Largest difference within the tolerance, by boundary, of those above 0."""


def compare(first: Trace, second: Trace) -> Comparison:
    """Compare two traces in the order of the boundaries, decision by decision.

    Raises: DataError if they have no boundary in common.
    """
    tables = [_by_place(trace) for trace in (first, second)]
    recorded = [{name for _, name, _ in table} for table in tables]
    common = recorded[0] & recorded[1]
    if not common:
        raise DataError(
            f"{first.source} records {sorted(recorded[0])} and {second.source} "
            f"{sorted(recorded[1])}; expected at least one boundary in both"
        )
    equal = dict.fromkeys((b.name for b in BOUNDARIES if b.name in common), 0)
    largest: dict[str, float] = {}
    ordered = {boundary.name: boundary for boundary in BOUNDARIES}
    places = sorted(
        {place for table in tables for place in table if place[1] in common},
        key=lambda place: (place[0], list(ordered).index(place[1]), place[2]),
    )
    difference = None
    for decision, name, key in places:
        values = [table.get((decision, name, key)) for table in tables]
        difference = _difference(ordered[name], decision, key, values[0], values[1], largest)
        if difference is not None:
            break
        equal[name] += 1
    num_decisions = difference.decision if difference else 1 + max(place[0] for place in places)
    only = {
        name: 0 if name in recorded[0] else 1
        for name in ordered
        if name in recorded[0] ^ recorded[1]
    }
    return Comparison(difference, num_decisions, equal, only, largest)


def _by_place(trace: Trace) -> dict[tuple[int, str, str], TraceEntry]:
    table: dict[tuple[int, str, str], TraceEntry] = {}
    for entry in trace.entries:
        place = entry.decision, entry.boundary, entry.key
        if place in table:
            raise DataError(f"{trace.source} records {place} twice; expected each value once")
        table[place] = entry
    return table


def _difference(
    boundary: Boundary,
    decision: int,
    key: str,
    first: TraceEntry | None,
    second: TraceEntry | None,
    largest: dict[str, float],
) -> Difference | None:
    if first is None or second is None:
        shown = tuple("recorded" if entry else "not recorded" for entry in (first, second))
        why = "one episode ended earlier, or one trace lacks this camera"
        return Difference(boundary, decision, key, (shown[0], shown[1]), why, None)
    a, b = first.value, second.value
    if not isinstance(a, np.ndarray) or not isinstance(b, np.ndarray):
        if type(a) is type(b) and not isinstance(a, np.ndarray) and a == b:
            return None
        return Difference(boundary, decision, key, (_plain(a), _plain(b)), "not the same", None)
    if a.shape != b.shape:
        shapes = f"[{', '.join(map(str, a.shape))}]", f"[{', '.join(map(str, b.shape))}]"
        return Difference(
            boundary, decision, key, shapes, "other shapes", hint(boundary.name, a, b)
        )
    apart = np.abs(a.astype(np.float64) - b.astype(np.float64))
    # NaN is apart from every number; only two NaN are equal
    apart = np.where(np.isnan(apart), np.where(np.isnan(a) & np.isnan(b), 0.0, np.inf), apart)
    if apart.size == 0 or apart.max() <= boundary.tolerance:
        if apart.size and apart.max() > 0:
            largest[boundary.name] = max(largest.get(boundary.name, 0.0), float(apart.max()))
        return None
    wrong = apart > boundary.tolerance
    size = f"{wrong.sum()} of {wrong.size} numbers differ, by {apart.max():g} at most"
    place = tuple(int(n) for n in np.argwhere(wrong)[0])
    values = _around(a, place), _around(b, place)
    return Difference(boundary, decision, key, values, size, hint(boundary.name, a, b))


def _around(array: np.ndarray, place: tuple[int, ...]) -> str:
    """Show the numbers from the first one that differs."""
    *row, column = place
    numbers = array[tuple(row)][column : column + _SHOWN]
    shown = ", ".join(f"{number:.6g}" for number in numbers.tolist())
    return f"[{', '.join(map(str, place))}] = {shown}{' ...' if array.size > len(numbers) else ''}"


def _plain(value: Value) -> str:
    return f"numbers {list(value.shape)}" if isinstance(value, np.ndarray) else repr(value)
