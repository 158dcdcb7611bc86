"""Hints: known mistakes that turn one value of a boundary into the other."""

from collections.abc import Callable
from typing import Final

import numpy as np

JPEG_SIZED: Final = 8
"""Two decoders of the same JPEG file differ by less than this in almost every byte."""

_TURNS: Final[dict[str, Callable[[np.ndarray], np.ndarray]]] = {
    "turned by 180 degrees": lambda picture: picture[::-1, ::-1],
    "upside down": lambda picture: picture[::-1],
    "mirrored": lambda picture: picture[:, ::-1],
    "turned by 90 degrees": lambda picture: np.rot90(picture),
    "turned by 270 degrees": lambda picture: np.rot90(picture, 3),
    "in BGR instead of RGB": lambda picture: picture[..., ::-1],
}


def hint(boundary: str, first: np.ndarray, second: np.ndarray) -> str | None:
    """Return how `second` follows from `first` by a known mistake, or None."""
    if first.ndim == 3 and first.dtype == np.uint8:
        return _of_pictures(first, second)
    if first.shape != second.shape:
        return None
    if boundary == "state":
        return _of_states(first, second)
    if boundary in ("action", "executed_action", "unit_action") and first.ndim == 2:
        return _of_actions(first, second)
    return None


def _of_pictures(first: np.ndarray, second: np.ndarray) -> str | None:
    for name, turned in _TURNS.items():
        if np.array_equal(turned(first), second):
            return f"the second picture is the first one {name}"
    if first.shape != second.shape:
        return None
    apart = np.abs(first.astype(np.int64) - second)
    if np.quantile(apart, 0.99) < JPEG_SIZED:
        return "small differences all over the picture, as between two codecs or two kernels"
    return None


def _of_states(first: np.ndarray, second: np.ndarray) -> str | None:
    """Compare orientations as rotations: q and -q are one rotation with two axis-angle vectors."""
    if first.shape != (8,):
        return None
    rotations = [_rotation(state[3:6]) for state in (first, second)]
    others = np.r_[0:3, 6:8]
    if np.allclose(first[others], second[others], atol=1e-6) and np.allclose(
        rotations[0], rotations[1], atol=1e-5
    ):
        return "both orientations are one rotation: their quaternions have opposite signs"
    return None


def _of_actions(first: np.ndarray, second: np.ndarray) -> str | None:
    same_arm = np.allclose(first[:, :-1], second[:, :-1], atol=1e-4)
    if same_arm and np.allclose(first[:, -1], -second[:, -1], atol=1e-4):
        return "only the gripper differs, by its sign: one opens where the other closes"
    if same_arm:
        return "only the gripper differs"
    scale, offset = _line(first.ravel(), second.ravel())
    if np.allclose(scale * first + offset, second, atol=1e-4):
        return f"the second is the first times {scale:.4g} plus {offset:.4g}"
    by_column = [_line(a, b) for a, b in zip(first.T, second.T, strict=True)]
    if len(first) > 2 and all(
        np.allclose(k * a + d, b, atol=1e-4)
        for (k, d), a, b in zip(by_column, first.T, second.T, strict=True)
    ):
        return "each dimension is scaled and shifted, as by other statistics"
    return None


def _rotation(vector: np.ndarray) -> np.ndarray:
    """Return the matrix of an axis times an angle (Rodrigues)."""
    angle = float(np.linalg.norm(vector))
    if angle == 0.0:
        return np.eye(3)
    x, y, z = vector / angle
    cross = np.array([[0.0, -z, y], [z, 0.0, -x], [-y, x, 0.0]])
    turned: np.ndarray = np.eye(3) + np.sin(angle) * cross + (1 - np.cos(angle)) * cross @ cross
    return turned


def _line(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Return slope and offset of the least-squares line; (1, mean) if x is constant."""
    if np.ptp(x) == 0.0:
        return 1.0, float(np.mean(y - x))
    slope, offset = np.polyfit(x.astype(np.float64), y.astype(np.float64), 1)
    return float(slope), float(offset)
