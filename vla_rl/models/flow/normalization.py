"""Normalisation of states and actions, as openpi and LeRobot compute it.

    MEAN_STD     (x - mean) / (std + epsilon)
    QUANTILES    2 (x - q01) / (q99 - q01) - 1
    QUANTILE10   2 (x - q10) / (q90 - q10) - 1
    MIN_MAX      2 (x - min) / (max - min) - 1
    IDENTITY     x

openpi adds 1e-6 to every divisor, also on the way back, in float64. LeRobot adds its `eps` to a
standard deviation on the way in only, puts `eps` in the place of a range that is 0, and computes in
float32. A policy that is trained under one kind and played under another solves nothing and raises no
error, so statistics are refused here where a project would use them in silence.
"""

from collections.abc import Mapping
from typing import Any, Final, Literal, TypeAlias

import numpy as np

from vla_rl.errors import CheckpointError

NormalizationKind: TypeAlias = Literal["MEAN_STD", "QUANTILES", "QUANTILE10", "MIN_MAX", "IDENTITY"]
Project: TypeAlias = Literal["openpi", "lerobot"]
Statistics: TypeAlias = Mapping[str, np.ndarray]
"""Vectors of one feature by name: mean, std, q01, q99, min, max, ..."""

FIELDS: Final[Mapping[NormalizationKind, tuple[str, ...]]] = {
    "MEAN_STD": ("mean", "std"),
    "QUANTILES": ("q01", "q99"),
    "QUANTILE10": ("q10", "q90"),
    "MIN_MAX": ("min", "max"),
    "IDENTITY": (),
}
"""Statistics that each kind reads: a centre and a spread, or a low and a high end."""

OPENPI_EPSILON: Final = 1e-6
LEROBOT_EPSILON: Final = 1e-8

PADDING: Final = 1e-9
"""Largest number in the statistics of padding: openpi's quantiles are edges of bins that begin 1e-10 below the
smallest value, and its early statistics are of padded vectors."""

UNTRAINED: Final[Mapping[NormalizationKind, tuple[tuple[float, float], ...]]] = {
    "MEAN_STD": ((0.0, 1.0),),
    "QUANTILES": ((0.0, 1.0), (0.0, 0.0)),
    "QUANTILE10": ((0.0, 1.0), (0.0, 0.0)),
    "MIN_MAX": ((0.0, 1.0), (0.0, 0.0)),
    "IDENTITY": (),
}
"""Values of both statistics in every number that nothing was computed from."""


class Normalizer:
    """Normalisation of one feature; immutable.

    Args:
        kind: the formula.
        statistics: the feature's vectors; those that the kind reads have one width.
        project: whose arithmetic.
        epsilon: LeRobot's `eps`; openpi's is fixed.
    """

    def __init__(
        self,
        kind: NormalizationKind,
        statistics: Statistics,
        project: Project,
        epsilon: float = LEROBOT_EPSILON,
    ) -> None:
        self.kind, self.statistics, self.project = kind, dict(statistics), project
        self._dtype: Any = np.float64 if project == "openpi" else np.float32
        if kind == "IDENTITY":
            return
        ends: list[Any] = [statistics[name].astype(self._dtype) for name in FIELDS[kind]]
        first, second = ends
        is_centred = kind == "MEAN_STD"
        self._offset, spread = first, second if is_centred else second - first
        if project == "openpi":
            self._divisor = self._factor = spread + OPENPI_EPSILON
        elif is_centred:
            self._divisor, self._factor = spread + self._dtype(epsilon), spread
        else:
            self._divisor = np.where(spread == 0.0, self._dtype(epsilon), spread)
            self._factor = self._divisor

    @property
    def width(self) -> int | None:
        """Width of the statistics; None if nothing is scaled."""
        return None if self.kind == "IDENTITY" else len(self._offset)

    def normalise(self, values: np.ndarray) -> np.ndarray:
        """Normalise values [..., D], D up to the width of the statistics, in the project's dtype."""
        if self.kind == "IDENTITY":
            return np.asarray(values, self._dtype)
        part = slice(values.shape[-1])
        scaled = (values.astype(self._dtype) - self._offset[part]) / self._divisor[part]
        return np.asarray(scaled if self.kind == "MEAN_STD" else scaled * 2 - 1, self._dtype)

    def restore(self, values: np.ndarray) -> np.ndarray:
        """Invert `normalise`, as the project does it, in its dtype."""
        if self.kind == "IDENTITY":
            return np.asarray(values, self._dtype)
        part = slice(values.shape[-1])
        scaled = values.astype(self._dtype)
        if self.kind != "MEAN_STD":
            scaled = (scaled + 1) / 2
        return np.asarray(scaled * self._factor[part] + self._offset[part], self._dtype)


def parse_kind(name: object, feature: str, source: str) -> NormalizationKind:
    """Return the kind of that name.

    Raises: CheckpointError if there is none, or an unknown one.
    """
    for kind in FIELDS:
        if name == kind:
            return kind
    given = "not named" if name is None else repr(name)
    raise CheckpointError(
        f"{source}: the kind of normalisation of the {feature} is {given}, expected one of "
        f"{', '.join(FIELDS)}; name the one that the policy was trained with, because any other "
        "makes it fail in silence."
    )


def require_usable(
    feature: str, kind: NormalizationKind, statistics: Statistics, width: int, source: str
) -> None:
    """Check the statistics of a feature of `width` used numbers.

    Raises: CheckpointError if they are absent, of another width, at their initial values, constant in
    all used numbers, or lack what the kind reads.
    """
    remedy = "copy the statistics of the policy's training data into the folder"
    if kind == "IDENTITY":
        return
    if not statistics:
        raise CheckpointError(
            f"{source}: the {feature} has no statistics, expected {' and '.join(FIELDS[kind])} for "
            f"{kind}; {remedy}, because without them it is passed on unscaled."
        )
    lacking = [name for name in FIELDS[kind] if name not in statistics]
    if lacking:
        raise CheckpointError(
            f"{source}: the {feature} is to be normalised by {kind}, but its statistics lack "
            f"{' and '.join(lacking)}; they have {', '.join(sorted(statistics))}. Name the kind that "
            f"the policy was trained with, or {remedy}."
        )
    first, second = (np.asarray(statistics[name], np.float64) for name in FIELDS[kind])
    if first.ndim != 1 or first.shape != second.shape or len(first) < width:
        raise CheckpointError(
            f"{source}: the {feature}'s {' and '.join(FIELDS[kind])} have shapes "
            f"{list(first.shape)} and {list(second.shape)}, expected one number for each of its "
            f"{width}; {remedy}."
        )
    _require_computed(feature, kind, (first[:width], second[:width]), f"{source}: the {feature}")


def _require_computed(
    feature: str, kind: NormalizationKind, ends: tuple[np.ndarray, np.ndarray], source: str
) -> None:
    first, second = ends
    names = " and ".join(FIELDS[kind])
    is_initial = not (np.isfinite(first).all() and np.isfinite(second).all()) or any(
        bool((first == one).all() and (second == other).all()) for one, other in UNTRAINED[kind]
    )
    if is_initial:
        raise CheckpointError(
            f"{source}'s {names} are at their initial values ({first[0]:g} and {second[0]:g}), "
            "expected those of the training data; the folder was saved before they were computed. "
            "Compute them on the data that the policy was trained with."
        )
    spread = second if kind == "MEAN_STD" else second - first
    if (spread < 0).any():
        number = int((spread < 0).argmax())
        raise CheckpointError(
            f"{source}'s {names} are in the wrong order at number {number} ({first[number]:g} and "
            f"{second[number]:g}); they are of another kind, or exchanged."
        )
    if (spread == 0).all():
        raise CheckpointError(
            f"{source}'s {names} are constant in all {len(first)} used numbers, expected some "
            "spread: every observation would look alike. Compute them on the data that the policy "
            "was trained with."
        )


def count_used(statistics: Statistics) -> int:
    """Return how many leading numbers of a feature carry anything: those behind are 0 in every
    statistic, as padding is.
    """
    widths = {len(vector) for vector in statistics.values()}
    if len(widths) != 1:
        return min(widths, default=0)
    is_used = np.any([np.abs(vector) > PADDING for vector in statistics.values()], axis=0)
    used = np.flatnonzero(is_used)
    return int(used[-1]) + 1 if len(used) else widths.pop()
