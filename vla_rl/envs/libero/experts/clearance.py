"""The lowest height to which the hand can go without palm or fingers touching what is below."""

import numpy as np

_PALM_HALF = (0.108, 0.036)
"""Half sizes of the palm along the fingers' movement and across it (m)."""

PALM_ABOVE_M = 0.028
"""Height of the palm's underside above the point between the finger tips (m)."""

_FINGER_HALF_WIDTH_M = 0.014
_FINGER_OUTSIDE_M = 0.024
"""Thickness of a finger, measured outwards from the surface that grips."""

FINGER_BELOW_M = 0.012
"""Distance of the finger tips below the point between them (m)."""

OPEN_HALF_M = 0.04
"""Distance of each finger from the middle when the hand is open (m)."""


def lowest_height(
    cloud: np.ndarray, xy: np.ndarray, yaw: float, finger_half_m: float = OPEN_HALF_M
) -> float:
    """Return how low (m) the point between the finger tips can come at `xy`, for a hand that points
    down; -inf over nothing.

    Args:
        cloud: float64 [N, 3], points that must not be touched.
        xy, yaw: position of the hand (m), and direction in which its fingers move (rad).
        finger_half_m: distance of each finger from the middle (m).
    """
    sine, cosine = np.sin(yaw), np.cos(yaw)
    local = (cloud[:, :2] - xy) @ np.array([[cosine, -sine], [sine, cosine]])
    along, across = np.abs(local[:, 0]), np.abs(local[:, 1])
    is_below_palm = (along < _PALM_HALF[0]) & (across < _PALM_HALF[1])
    is_below_finger = (
        (along > finger_half_m - 0.002)
        & (along < finger_half_m + _FINGER_OUTSIDE_M)
        & (across < _FINGER_HALF_WIDTH_M)
    )
    height = cloud[:, 2]
    return float(
        max(
            height[is_below_palm].max(initial=-np.inf) - PALM_ABOVE_M,
            height[is_below_finger].max(initial=-np.inf) + FINGER_BELOW_M,
        )
    )


def highest_on_way(cloud: np.ndarray, start: np.ndarray, end: np.ndarray, radius_m: float) -> float:
    """Return the height (m) of the highest point within `radius_m` of the straight way from `start`
    to `end`, seen from above.
    """
    way = end[:2] - start[:2]
    share = np.clip((cloud[:, :2] - start[:2]) @ way / max(float(way @ way), 1e-9), 0.0, 1.0)
    distance = np.linalg.norm(cloud[:, :2] - start[:2] - share[:, None] * way, axis=1)
    return float(cloud[distance < radius_m, 2].max(initial=-np.inf))
