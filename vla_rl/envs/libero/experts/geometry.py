"""The experts' view of the scene: shapes of bodies, room for the hand, spots where things can go.

Everything is in the world frame, in metres. Each collision shape is replaced by its bounding box in
its own frame, which is exact for LIBERO's assets, because they are made of boxes.
"""

from collections.abc import Collection
from typing import Any, NamedTuple

import numpy as np

from vla_rl.envs.libero.scene import Scene

_SIGNS = np.array([[x, y, z] for x in (-1, 1) for y in (-1, 1) for z in (-1, 1)], np.float64)
_SPACING_M = 0.01
"""Distance between neighbouring points of a cloud (m)."""


def get_origin(scene: Scene, name: str) -> np.ndarray:
    """Return the origin of an object, a fixture or a region, float64 [3].

    Goals are evaluated by it.
    """
    body = scene.domain.obj_body_id.get(name)
    return np.array(scene.data.site(name).xpos if body is None else scene.data.xpos[body])


def get_root_body(scene: Scene, name: str) -> int:
    """Return the outermost body of an object or a fixture."""
    return int(scene.domain.obj_body_id[name])


def get_box_corners(scene: Scene, body: int) -> np.ndarray:
    """Return the corners of the N collision boxes of `body` and of all bodies attached to it,
    float64 [N, 8, 3].
    """
    return np.array(
        [_geom_corners(scene, geom) for geom in get_solid_geoms(scene.model, body)]
    ).reshape(-1, 8, 3)


def get_surface_points(scene: Scene, bodies: Collection[int]) -> np.ndarray:
    """Return points on the collision boxes of `bodies` and of their children, at most 1 cm apart,
    float64 [N, 3].
    """
    clouds = [
        _geom_points(scene, geom) for body in bodies for geom in get_solid_geoms(scene.model, body)
    ]
    return np.concatenate(clouds) if clouds else np.empty((0, 3))


def get_fixed_points(scene: Scene, body: int) -> np.ndarray:
    """Return points on the collision boxes of `body` and of the parts that are fixed to it, without
    doors and drawers, float64 [N, 3].
    """
    model = scene.model
    is_fixed = np.zeros(model.nbody, bool)
    is_fixed[body] = True
    # MuJoCo numbers parents before their children, so that one pass is enough.
    for other in range(body + 1, model.nbody):
        is_fixed[other] = is_fixed[model.body_parentid[other]] and not model.body_jntnum[other]
    geoms = [geom for geom in get_solid_geoms(model, body) if is_fixed[model.geom_bodyid[geom]]]
    return np.concatenate([_geom_points(scene, geom) for geom in geoms])


def get_obstacle_points(scene: Scene, without: Collection[str] = ()) -> np.ndarray:
    """Return points on every object and fixture of the task except the named ones and tables,
    float64 [N, 3].
    """
    names = [
        name
        for name in (*scene.domain.objects_dict, *scene.domain.fixtures_dict)
        if name not in without
    ]
    return get_surface_points(
        scene, [get_root_body(scene, name) for name in names if name in scene.domain.obj_body_id]
    )


def get_solid_geoms(model: Any, body: int) -> list[int]:
    """Return the ids of the geoms of `body` and of all bodies attached to it that can touch
    something.
    """
    is_below = np.zeros(model.nbody, bool)
    is_below[body] = True
    # MuJoCo numbers parents before their children, so that one pass is enough.
    for other in range(body + 1, model.nbody):
        is_below[other] = is_below[model.body_parentid[other]]
    is_solid = (model.geom_contype > 0) | (model.geom_conaffinity > 0)
    return [int(geom) for geom in np.flatnonzero(is_below[model.geom_bodyid] & is_solid)]


def _geom_corners(scene: Scene, geom: int) -> np.ndarray:
    return _transform_to_box(scene, geom, _SIGNS)


def _geom_points(scene: Scene, geom: int) -> np.ndarray:
    half = scene.model.geom_aabb[geom, 3:]
    counts = np.maximum(np.ceil(2 * half / _SPACING_M).astype(int), 1) + 1
    grid = np.stack(
        np.meshgrid(*(np.linspace(-1, 1, count) for count in counts), indexing="ij"), -1
    ).reshape(-1, 3)
    return _transform_to_box(scene, geom, grid[(np.abs(grid) == 1.0).any(1)])


def _transform_to_box(scene: Scene, geom: int, unit: np.ndarray) -> np.ndarray:
    """Transform points of the cube from -1 to 1 to the geom's bounding box."""
    box = scene.model.geom_aabb[geom]
    rotation = scene.data.geom_xmat[geom].reshape(3, 3)
    return np.asarray(scene.data.geom_xpos[geom] + (box[:3] + unit * box[3:]) @ rotation.T)


def rotation_vector(rotation: np.ndarray) -> np.ndarray:
    """Return axis times angle (rad) of a rotation matrix, for angles below a half turn."""
    axis = np.array(
        [
            rotation[2, 1] - rotation[1, 2],
            rotation[0, 2] - rotation[2, 0],
            rotation[1, 0] - rotation[0, 1],
        ]
    )
    sine = np.linalg.norm(axis) / 2
    if sine < 1e-9:
        return np.zeros(3)
    return np.asarray(axis / (2 * sine) * np.arctan2(sine, (np.trace(rotation) - 1) / 2))


_PALM_HALF_M = (0.108, 0.036)
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


def get_lowest_height(
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
    is_below_palm = (along < _PALM_HALF_M[0]) & (across < _PALM_HALF_M[1])
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


def get_highest_on_way(
    cloud: np.ndarray, start: np.ndarray, end: np.ndarray, radius_m: float
) -> float:
    """Return the height (m) of the highest point within `radius_m` of the straight way from `start`
    to `end`, seen from above.
    """
    way = end[:2] - start[:2]
    share = np.clip((cloud[:, :2] - start[:2]) @ way / max(float(way @ way), 1e-9), 0.0, 1.0)
    distance = np.linalg.norm(cloud[:, :2] - start[:2] - share[:, None] * way, axis=1)
    return float(cloud[distance < radius_m, 2].max(initial=-np.inf))


_REACH_M = 0.7
"""Distance of a Panda's wrist from its shoulder with a nearly straight elbow (m)."""

_WRIST_ABOVE_HAND_M, _WRIST_BEHIND_HAND_M = 0.2, 0.09
"""Position of the wrist over the point between the finger tips of a hand that points down (m)."""


def get_highest_reach(scene: Scene, position: np.ndarray) -> float:
    """Return the height (m) up to which the arm can lift a hand that points down at `position` [2 or 3].

    Higher up the elbow is straight, from where no command of the hand's controller bends it.
    """
    shoulder = np.array(scene.data.body("robot0_link2").xpos)
    distance = float(np.linalg.norm(position[:2] - shoulder[:2])) - _WRIST_BEHIND_HAND_M
    above = np.sqrt(max(_REACH_M**2 - distance**2, 0.0))
    return float(shoulder[2] + above - _WRIST_ABOVE_HAND_M)


_SHARES = (0.0, -0.4, 0.4, -0.8, 0.8)
_OVERLAP_COST = 10.0

_ROOM_ABOVE_M = 0.06
"""Distance that the hand needs above what it has put down, to rise from it (m)."""


class Spot(NamedTuple):
    """A spot for the origin of an object.

    Example:
        Spot(xy=array([0.05, 0.20]), support_m=0.90)
    """

    xy: np.ndarray
    """float64 [2], world (m)."""

    support_m: float
    """Height of the surface below the object (m, world)."""


def choose_spot(
    scene: Scene, name: str, target: str, radius_m: float, is_shared: bool = False
) -> Spot:
    """Return the best spot for `name` on or in `target`: free of other objects, and as near to the
    middle as that allows.

    `radius_m` is how far the object reaches from its origin, seen from above. If `is_shared`, room
    is left for others.
    """
    middle = get_origin(scene, target)
    owner, below = get_owner(scene, target), get_obstacle_points(scene, without={name})
    others = get_obstacle_points(scene, without={name, owner or target})
    site = scene.domain.object_sites_dict.get(target)
    if site is None:
        return Spot(middle[:2], _support_height(below, middle[:2], middle[2]))
    rotation = np.array(scene.data.site(target).xmat).reshape(3, 3)
    half = np.abs(rotation @ np.array(scene.model.site(target).size))[:2]
    height = float(np.ptp(get_surface_points(scene, [get_root_body(scene, name)])[:, 2]))
    floor = middle[2] - get_half_height(scene, target)
    best: tuple[float, Spot] | None = None
    for share_x in _SHARES:
        for share_y in _SHARES:
            xy = middle[:2] + half * (share_x, share_y)
            distance = np.linalg.norm(others[:, :2] - xy, axis=1)
            overlap = radius_m - distance[others[:, 2] > floor + 0.01].min(initial=radius_m)
            off_middle = float(np.linalg.norm(xy - middle[:2]))
            wanted = 0.5 * float(half.max()) if is_shared else 0.0
            overlap += max(0.0, floor + height + _ROOM_ABOVE_M - get_highest_reach(scene, xy))
            # LIBERO's goals test whether an object's origin is in the region, and do not ask for
            # its middle: an overlap of 1 cm is worse than 9 cm off the middle.
            cost = abs(off_middle - wanted) + _OVERLAP_COST * float(overlap)
            # Rounding must not choose between two spots that are equally good: the same start would
            # be solved in two ways.
            if best is None or cost < best[0] - 1e-9:
                best = cost, Spot(xy, _support_height(below, xy, floor))
    assert best is not None
    return best[1]


def has_roof(scene: Scene, target: str) -> bool:
    """Return whether the region `target` is inside something that covers it, such as a microwave or
    a shelf's lower board.
    """
    owner = get_owner(scene, target)
    if owner is None:
        return False
    middle = get_origin(scene, target)
    top = middle[2] + get_half_height(scene, target)
    return bool(
        _support_height(get_surface_points(scene, [get_root_body(scene, owner)]), middle[:2], top)
        > top
    )


def get_owner(scene: Scene, target: str) -> str | None:
    """Return the object or fixture that a region belongs to.

    None for a region of a table, and for anything else.
    """
    site = scene.domain.object_sites_dict.get(target)
    parent = None if site is None else site.parent_name
    return parent if parent in scene.domain.obj_body_id else None


def get_half_height(scene: Scene, region: str) -> float:
    """Return half the height of a region (m)."""
    site = scene.model.site(region)
    rotation = np.array(scene.data.site(region).xmat).reshape(3, 3)
    return float(np.abs(rotation @ np.array(site.size))[2])


def _support_height(points: np.ndarray, xy: np.ndarray, least_m: float) -> float:
    """Return the height of the support below a spot: the highest of `points` [N, 3] near its
    middle.
    """
    near = points[np.linalg.norm(points[:, :2] - xy, axis=1) < 0.02]
    return max(float(near[:, 2].max(initial=-np.inf)), least_m)
