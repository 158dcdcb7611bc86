"""Comparison of two traces: the first value at which they differ, with both values and a hint.

A hint is a known mistake that turns one value of a boundary into the other.
"""

from collections.abc import Callable
from typing import Final

import msgspec
import numpy as np

from vla_rl.errors import DataError
from vla_rl.evaluation.parity.trace import BOUNDARIES, Boundary, Trace, TraceEntry, Value

MOST_NUMBERS: Final = 8
"""Numbers of an array that a difference shows."""


class Difference(msgspec.Struct, frozen=True):
    """The first value at which two traces differ.

    Example:
        Difference(boundary=..., decision=3, key="image", values=("...", "..."),
            size="41 of 150528 pixels differ", hint="turned by 180 degrees")
    """

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
    tables = [_by_position(trace) for trace in (first, second)]
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
    keys = sorted(
        {position for table in tables for position in table if position[1] in common},
        key=lambda position: (position[0], list(ordered).index(position[1]), position[2]),
    )
    # only the first difference is reported: all that follow in an episode are its consequences
    difference = None
    for decision, name, key in keys:
        values = [table.get((decision, name, key)) for table in tables]
        difference = _difference(ordered[name], decision, key, values[0], values[1], largest)
        if difference is not None:
            break
        equal[name] += 1
    num_decisions = difference.decision if difference else 1 + max(position[0] for position in keys)
    only = {
        name: 0 if name in recorded[0] else 1
        for name in ordered
        if name in recorded[0] ^ recorded[1]
    }
    return Comparison(difference, num_decisions, equal, only, largest)


def _by_position(trace: Trace) -> dict[tuple[int, str, str], TraceEntry]:
    table: dict[tuple[int, str, str], TraceEntry] = {}
    for entry in trace.entries:
        position = entry.decision, entry.boundary, entry.key
        if position in table:
            raise DataError(f"{trace.source} records {position} twice; expected each value once")
        table[position] = entry
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
        return Difference(
            boundary, decision, key, (_format_value(a), _format_value(b)), "not the same", None
        )
    if a.shape != b.shape:
        shapes = f"[{', '.join(map(str, a.shape))}]", f"[{', '.join(map(str, b.shape))}]"
        return Difference(
            boundary, decision, key, shapes, "other shapes", find_hint(boundary.name, a, b)
        )
    # in float64, because the difference of two bytes would wrap around
    apart = np.abs(a.astype(np.float64) - b.astype(np.float64))
    # NaN is apart from every number; only two NaN are equal
    apart = np.where(np.isnan(apart), np.where(np.isnan(a) & np.isnan(b), 0.0, np.inf), apart)
    if apart.size == 0 or apart.max() <= boundary.tolerance:
        if apart.size and apart.max() > 0:
            largest[boundary.name] = max(largest.get(boundary.name, 0.0), float(apart.max()))
        return None
    wrong = apart > boundary.tolerance
    size = f"{wrong.sum()} of {wrong.size} numbers differ, by {apart.max():g} at most"
    position = tuple(int(n) for n in np.argwhere(wrong)[0])
    values = _format_around(a, position), _format_around(b, position)
    return Difference(boundary, decision, key, values, size, find_hint(boundary.name, a, b))


def _format_around(array: np.ndarray, position: tuple[int, ...]) -> str:
    """Show the numbers from the first one that differs."""
    *row, column = position
    numbers = array[tuple(row)][column : column + MOST_NUMBERS]
    shown = ", ".join(f"{number:.6g}" for number in numbers.tolist())
    return (
        f"[{', '.join(map(str, position))}] = {shown}{' ...' if array.size > len(numbers) else ''}"
    )


def _format_value(value: Value) -> str:
    return f"numbers {list(value.shape)}" if isinstance(value, np.ndarray) else repr(value)


JPEG_SIZED: Final = 8
"""Two decoders of the same JPEG file differ by less than this in almost every byte."""

_IMAGE_CHANGES: Final[dict[str, Callable[[np.ndarray], np.ndarray]]] = {
    "turned by 180 degrees": lambda image: image[::-1, ::-1],
    "upside down": lambda image: image[::-1],
    "mirrored": lambda image: image[:, ::-1],
    "turned by 90 degrees": lambda image: np.rot90(image),
    "turned by 270 degrees": lambda image: np.rot90(image, 3),
    "in BGR instead of RGB": lambda image: image[..., ::-1],
}


def find_hint(boundary: str, first: np.ndarray, second: np.ndarray) -> str | None:
    """Return how `second` follows from `first` by a known mistake, or None."""
    if first.ndim == 3 and first.dtype == np.uint8:
        return _image_hint(first, second)
    if first.shape != second.shape:
        return None
    if boundary == "state":
        return _state_hint(first, second)
    if boundary in ("action", "executed_action", "unit_action") and first.ndim == 2:
        return _action_hint(first, second)
    return None


def _image_hint(first: np.ndarray, second: np.ndarray) -> str | None:
    for name, turned in _IMAGE_CHANGES.items():
        if np.array_equal(turned(first), second):
            return f"the second image is the first one {name}"
    if first.shape != second.shape:
        return None
    apart = np.abs(first.astype(np.int64) - second)
    # not the maximum: at the edges of a few objects two codecs differ by more
    if np.quantile(apart, 0.99) < JPEG_SIZED:
        return "small differences all over the image, as between two codecs or two kernels"
    return None


def _state_hint(first: np.ndarray, second: np.ndarray) -> str | None:
    """Compare orientations as rotations: q and -q are one rotation with two axis-angle vectors."""
    if first.shape != (8,):
        return None
    rotations = [_rotation_matrix(state[3:6]) for state in (first, second)]
    others = np.r_[0:3, 6:8]
    if np.allclose(first[others], second[others], atol=1e-6) and np.allclose(
        rotations[0], rotations[1], atol=1e-5
    ):
        return "both orientations are one rotation: their quaternions have opposite signs"
    return None


def _action_hint(first: np.ndarray, second: np.ndarray) -> str | None:
    same_arm = np.allclose(first[:, :-1], second[:, :-1], atol=1e-4)
    if same_arm and np.allclose(first[:, -1], -second[:, -1], atol=1e-4):
        return "only the gripper differs, by its sign: one opens where the other closes"
    if same_arm:
        return "only the gripper differs"
    scale, offset = _fit_line(first.ravel(), second.ravel())
    if np.allclose(scale * first + offset, second, atol=1e-4):
        return f"the second is the first times {scale:.4g} plus {offset:.4g}"
    by_column = [_fit_line(a, b) for a, b in zip(first.T, second.T, strict=True)]
    if len(first) > 2 and all(
        np.allclose(k * a + d, b, atol=1e-4)
        for (k, d), a, b in zip(by_column, first.T, second.T, strict=True)
    ):
        return "each dimension is scaled and shifted, as by other statistics"
    return None


def _rotation_matrix(vector: np.ndarray) -> np.ndarray:
    """Return the matrix of an axis times an angle (Rodrigues)."""
    angle = float(np.linalg.norm(vector))
    if angle == 0.0:
        return np.eye(3)
    x, y, z = vector / angle
    cross = np.array([[0.0, -z, y], [z, 0.0, -x], [-y, x, 0.0]])
    turned: np.ndarray = np.eye(3) + np.sin(angle) * cross + (1 - np.cos(angle)) * cross @ cross
    return turned


def _fit_line(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Return slope and offset of the least-squares line; (1, mean) if x is constant."""
    if np.ptp(x) == 0.0:
        return 1.0, float(np.mean(y - x))
    slope, offset = np.polyfit(x.astype(np.float64), y.astype(np.float64), 1)
    return float(slope), float(offset)
