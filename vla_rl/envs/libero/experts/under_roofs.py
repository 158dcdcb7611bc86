"""Putting things under a roof, such as a microwave's, through the open side.

The hand holds what stands out towards it, such as a mug's handle, tilted so that the palm stays
outside.
"""

import numpy as np

from vla_rl.envs.libero.experts.geometry import (
    fixed_points,
    origin,
    root_body,
    surface_points,
)
from vla_rl.envs.libero.experts.goals import UnreachableError
from vla_rl.envs.libero.experts.grasps import MAX_WIDTH_M
from vla_rl.envs.libero.experts.hand import CLOSE, OPEN, Hand, Motion, nearest_turn, pointing
from vla_rl.envs.libero.experts.pick_and_place import approach
from vla_rl.envs.libero.experts.places import owner_of
from vla_rl.envs.libero.scene import Scene

_TILT = np.radians(40.0)
"""Angle of the hand below the horizontal: flatter, it touches what stands beside the thing that it
grasps; steeper, it touches the roof."""

_GRASP_DEPTH_M = 0.01
"""Distance of the grasp behind the foremost point of the object (m)."""

_SLICE_M = 0.02
"""Depth of the part of the object that has to fit between the fingers (m)."""

_BEFORE_M = 0.06
_OUTSIDE_M = 0.16
"""Distance in front of its place at which the object is brought to its height (m)."""

_ABOVE_FLOOR_M = 0.012
_BACK_M = 0.12
_SLOWLY = 0.6
_SLIPPED_M = 0.04
_DOWN = np.array([0.0, 0.0, -1.0])


def way_in(scene: Scene, place: str) -> np.ndarray | None:
    """Return the horizontal direction in which things can enter the region `place`, float64 [3].

    None if fixed parts of its owner close every side.
    """
    points, middle = _owner_points(scene, place), origin(scene, place)
    points = points[np.abs(points[:, 2] - middle[2]) < 0.03] - middle
    axes = np.array(scene.data.site(place).xmat).reshape(3, 3).T
    for outwards in (*axes, *-axes):
        ahead = points @ outwards
        beside = np.linalg.norm(points - ahead[:, None] * outwards, axis=1)
        is_closed = ((ahead > 0.0) & (beside < 0.06)).any()
        if abs(outwards[2]) < 0.5 and not is_closed:
            return np.asarray(-outwards)
    return None


def put_under_roof(scene: Scene, hand: Hand, name: str, place: str) -> Motion:
    """Grasp `name` on the side that faces out of `place`, carry it in, and let go.

    Raises: `UnreachableError` if `place` is closed on every side, or `name` cannot be grasped.
    """
    inwards = way_in(scene, place)
    if inwards is None:
        raise UnreachableError(f"{place} has a roof, and is closed on every side")
    grasp, above_bottom_m = _front_grasp(scene, name, inwards)
    ahead = np.cos(_TILT) * inwards + np.sin(_TILT) * _DOWN
    rotation = nearest_turn(pointing(ahead, np.cross(inwards, _DOWN)), hand.rotation)
    before = grasp - _BEFORE_M * ahead
    yield from approach(scene, hand, before, rotation)
    yield from hand.go(before, rotation, OPEN, tolerance_m=0.006, max_steps=60)
    yield from hand.go(grasp, rotation, OPEN, tolerance_m=0.006)
    yield from hand.hold(CLOSE, 10)

    goal = origin(scene, place)
    goal[2] = _floor_m(scene, place) + above_bottom_m
    held = hand.position - origin(scene, name)
    for action in _carry_in(scene, hand, name, goal, inwards, rotation):
        yield action
        if np.linalg.norm(hand.position - origin(scene, name) - held) > _SLIPPED_M:
            yield from hand.hold(OPEN, 4)
            yield from hand.rise(OPEN)
            return
    yield from hand.hold(OPEN, 10)
    back = hand.position - _BACK_M * ahead
    yield from hand.go(back, rotation, OPEN, tolerance_m=0.02, max_steps=20)


def _carry_in(
    scene: Scene,
    hand: Hand,
    name: str,
    goal: np.ndarray,
    inwards: np.ndarray,
    rotation: np.ndarray,
) -> Motion:
    """Bring the origin of `name` to the height of `goal`, in front of the opening, in, and down."""
    over = goal - _ABOVE_FLOOR_M * _DOWN
    outside = over - _OUTSIDE_M * inwards

    def bring(target: np.ndarray) -> np.ndarray:
        return np.asarray(hand.position + target - origin(scene, name))

    lifted = np.array([*hand.position[:2], bring(outside)[2]])
    yield from hand.go(lifted, rotation, CLOSE, tolerance_m=0.01, speed=_SLOWLY)
    yield from hand.go(lambda: bring(outside), rotation, CLOSE, max_steps=60)
    yield from hand.go(lambda: bring(over), rotation, CLOSE, tolerance_m=0.01, speed=_SLOWLY)
    yield from hand.go(lambda: bring(goal), rotation, CLOSE, tolerance_m=0.006, max_steps=15)


def _front_grasp(scene: Scene, name: str, inwards: np.ndarray) -> tuple[np.ndarray, float]:
    """Return the grasp of `name`, float64 [3], and the height of its origin above its underside (m).

    The grasp is in the middle of the part that stands out against `inwards`.
    """
    points = surface_points(scene, [root_body(scene, name)])
    ahead, across = points @ inwards, points @ np.cross(inwards, _DOWN)
    is_front = ahead < ahead.min() + _SLICE_M
    width_m = float(np.ptp(across[is_front]))
    if width_m > MAX_WIDTH_M:
        raise UnreachableError(
            f"{name} cannot be grasped from the side: the part that faces the hand is "
            f"{1000 * width_m:.1f} mm wide, and the fingers open {1000 * MAX_WIDTH_M:.1f} mm"
        )
    front = points[is_front]
    middle = (front.min(0) + front.max(0)) / 2
    middle += (ahead.min() + _GRASP_DEPTH_M - middle @ inwards) * inwards
    return middle, float(origin(scene, name)[2] - points[:, 2].min())


def _floor_m(scene: Scene, place: str) -> float:
    """Return the height of the floor below the middle of `place` (m)."""
    points, middle = _owner_points(scene, place), origin(scene, place)
    is_below = np.linalg.norm((points - middle)[:, :2], axis=1) < 0.03
    return float(points[is_below & (points[:, 2] < middle[2]), 2].max())


def _owner_points(scene: Scene, place: str) -> np.ndarray:
    owner = owner_of(scene, place)
    assert owner is not None
    return fixed_points(scene, root_body(scene, owner))
