"""Target places of objects, and the lowest height at which an object can be released there."""

from typing import NamedTuple

import numpy as np

from vla_rl.envs.libero.experts.geometry import obstacle_points, origin, root_body, surface_points
from vla_rl.envs.libero.scene import Scene

_SHARES = (0.0, -0.4, 0.4, -0.8, 0.8)
_TAKEN_COST = 10.0


class Spot(NamedTuple):
    """A place for the origin of an object."""

    xy: np.ndarray
    """float64 [2], world (m)."""

    support_m: float
    """Height of the surface below the object (m, world)."""


def choose_spot(
    scene: Scene, name: str, place: str, radius_m: float, is_shared: bool = False
) -> Spot:
    """Return the best place for `name` on or in `place`: free of other objects, and as near to the
    middle as that allows.

    `radius_m` is how far the object reaches from its origin, seen from above. If `is_shared`, room
    is left for others.
    """
    middle = origin(scene, place)
    owner, below = owner_of(scene, place), obstacle_points(scene, without={name})
    others = obstacle_points(scene, without={name, owner or place})
    site = scene.domain.object_sites_dict.get(place)
    if site is None:
        return Spot(middle[:2], _support(below, middle[:2], middle[2]))
    rotation = np.array(scene.data.site(place).xmat).reshape(3, 3)
    half = np.abs(rotation @ np.array(scene.model.site(place).size))[:2]
    floor = middle[2] - half_height(scene, place)
    best: tuple[float, Spot] | None = None
    for share_x in _SHARES:
        for share_y in _SHARES:
            xy = middle[:2] + half * (share_x, share_y)
            distance = np.linalg.norm(others[:, :2] - xy, axis=1)
            overlap = radius_m - distance[others[:, 2] > floor + 0.01].min(initial=radius_m)
            off_middle = float(np.linalg.norm(xy - middle[:2]))
            wanted = 0.5 * float(half.max()) if is_shared else 0.0
            cost = abs(off_middle - wanted) + _TAKEN_COST * float(overlap)
            if best is None or cost < best[0] - 1e-9:
                best = cost, Spot(xy, _support(below, xy, floor))
    assert best is not None
    return best[1]


def is_roofed(scene: Scene, place: str) -> bool:
    """Return whether the region `place` is inside something that covers it, such as a microwave or
    a shelf's lower board.
    """
    owner = owner_of(scene, place)
    if owner is None:
        return False
    middle = origin(scene, place)
    top = middle[2] + half_height(scene, place)
    return bool(_support(surface_points(scene, [root_body(scene, owner)]), middle[:2], top) > top)


def owner_of(scene: Scene, place: str) -> str | None:
    """Return the object or fixture that a region belongs to.

    None for a region of a table, and for anything else.
    """
    site = scene.domain.object_sites_dict.get(place)
    parent = None if site is None else site.parent_name
    return parent if parent in scene.domain.obj_body_id else None


def half_height(scene: Scene, region: str) -> float:
    """Return half the height of a region (m)."""
    site = scene.model.site(region)
    rotation = np.array(scene.data.site(region).xmat).reshape(3, 3)
    return float(np.abs(rotation @ np.array(site.size))[2])


def _support(points: np.ndarray, xy: np.ndarray, least_m: float) -> float:
    """Return the height of the support below a spot: the highest of `points` [N, 3] near its
    middle.
    """
    near = points[np.linalg.norm(points[:, :2] - xy, axis=1) < 0.02]
    return max(float(near[:, 2].max(initial=-np.inf)), least_m)
