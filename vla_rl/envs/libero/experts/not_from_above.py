"""Programs for things that the hand cannot put down from above.

Flat things such as plates are pushed over the table. What goes under a roof, such as a microwave's,
is put through the open side: the hand holds what stands out towards it, such as a mug's handle,
tilted so that the palm stays outside.
"""

from collections.abc import Iterator

import numpy as np

from vla_rl.envs.libero.experts.geometry import (
    get_fixed_points,
    get_lowest_height,
    get_obstacle_points,
    get_origin,
    get_owner,
    get_root_body,
    get_surface_points,
)
from vla_rl.envs.libero.experts.motions import (
    CLOSE,
    DOWN,
    OPEN,
    Goal,
    Hand,
    Motion,
    UnreachableError,
    get_nearest_turn,
    get_pointing,
    get_pointing_down,
)
from vla_rl.envs.libero.experts.picking import (
    MAX_WIDTH_M,
    approach,
    choose_grasp,
    find_rim_grasps,
    get_nearest_half_turn,
)
from vla_rl.envs.libero.scene import Scene

_TIP_BELOW_M = 0.0115
"""Distance of the finger tips below the point between them (m)."""

# The table's friction is nearly that of the fingers, so that a plate that is pressed harder sticks
# to the table instead of following the hand.
_PRESS_M = 0.004
"""Target depth of the tips below the surface (m), so that they press on it; if deeper, the plate is
stuck to the table."""

_PRESS_STEPS = 4

_LOST_M = 0.07
"""Distance from the middle of the plate at which the fingers have lost it (m)."""


def needs_push(scene: Scene, goal: Goal) -> bool:
    """Return whether a goal is reached by pushing: a plate that is to go to a part of the table."""
    return goal.subject.startswith("plate") and get_owner(scene, goal.target or "") is None


def push(scene: Scene, hand: Hand, name: str, target: str) -> Motion:
    """Press two fingers onto the middle of `name` and drag it to `target`."""
    points = get_surface_points(scene, [get_root_body(scene, name)])
    middle, goal = get_origin(scene, name), get_origin(scene, target)
    near = points[np.linalg.norm(points[:, :2] - middle[:2], axis=1) < 0.02]
    floor = near[:, 2].max()
    way = goal[:2] - middle[:2]
    yaw = float(np.arctan2(way[1], way[0]) + np.pi / 2)
    rotation = get_nearest_turn(get_pointing_down(yaw), hand.rotation)
    start = np.array([*middle[:2], floor + _TIP_BELOW_M])
    yield from approach(scene, hand, start, rotation)
    yield from hand.go(start, rotation, OPEN, tolerance_m=0.008, max_steps=30)
    pressed = start[2] - _PRESS_M
    yield from hand.go(
        np.array([*start[:2], pressed]), rotation, OPEN, tolerance_m=0.0, max_steps=_PRESS_STEPS
    )

    def follow_target() -> np.ndarray:
        return np.array([*(hand.position + goal - get_origin(scene, name))[:2], pressed])

    for action in hand.go(follow_target, rotation, OPEN, tolerance_m=0.0, max_steps=120):
        yield action
        if np.linalg.norm((hand.position - get_origin(scene, name))[:2]) > _LOST_M:
            break
    yield from hand.rise(OPEN)


def make_room(scene: Scene, hand: Hand, name: str, coming: np.ndarray) -> Motion:
    """Drag a hollow thing to the nearest spot where it can still be grasped after the points
    `coming` arrive.
    """
    points = get_surface_points(scene, [get_root_body(scene, name)])
    middle = get_origin(scene, name)
    # An open drawer ends above what lies in front of its cabinet, where the hand could no longer
    # reach it.
    others = np.concatenate([get_obstacle_points(scene, without={name}), coming])
    others = others[np.linalg.norm(others[:, :2] - middle[:2], axis=1) < 0.35]
    radius = float(np.linalg.norm(points[:, :2] - middle[:2], axis=1).max())
    shift = next(
        (
            shift
            for shift in _list_shifts()
            if _is_free(points + shift, middle + shift, radius, others)
        ),
        None,
    )
    if shift is None or not shift.any():
        return
    goal = middle + shift

    def cost(yaw: float) -> float:
        lowest = max(get_lowest_height(others, xy[:2], yaw, 0.0) for xy in (middle, goal))
        return lowest + 0.001 * abs(get_nearest_half_turn(yaw - hand.yaw))

    rotation = get_nearest_turn(
        get_pointing_down(min(np.linspace(0.0, np.pi, 12, endpoint=False), key=cost)), hand.rotation
    )
    inside = np.array([*middle[:2], max(points[:, 2].max() - 0.02, middle[2] + 0.025)])
    yield from approach(scene, hand, inside, rotation, CLOSE)
    yield from hand.go(inside, rotation, CLOSE, max_steps=20)
    yield from hand.go(
        lambda: np.array([*(hand.position + goal - get_origin(scene, name))[:2], inside[2]]),
        rotation,
        CLOSE,
    )
    yield from hand.rise(OPEN, 8)


def _list_shifts() -> Iterator[np.ndarray]:
    """Yield shifts of something on the table (m), the shortest first; the very first is zero."""
    yield np.zeros(3)
    for distance in (0.04, 0.06, 0.08, 0.1, 0.12, 0.14):
        for angle in np.linspace(0.0, 2 * np.pi, 16, endpoint=False):
            yield np.array([distance * np.cos(angle), distance * np.sin(angle), 0.0])


def _is_free(points: np.ndarray, middle: np.ndarray, radius_m: float, others: np.ndarray) -> bool:
    """Return whether a thing with the surface `points` about `middle` could be grasped and lifted
    straight up.
    """
    if (np.linalg.norm(others[:, :2] - middle[:2], axis=1) < radius_m + 0.01).any():
        return False
    grasp = choose_grasp(find_rim_grasps(points), others, 0.0, lambda _: 0.0)
    return grasp is not None and grasp.position[2] < grasp.highest_m - 0.006


_TILT = np.radians(40.0)
"""Angle of the hand below the horizontal: flatter, it touches what stands beside the thing that it
grasps; steeper, it touches the roof."""

_GRASP_DEPTH_M = 0.01
"""Distance of the grasp behind the foremost point of the object (m)."""

_SLICE_M = 0.02
"""Depth of the part of the object that has to fit between the fingers (m)."""

_BEFORE_M = 0.06
_OUTSIDE_M = 0.16
"""Distance in front of its target at which the object is brought to its height (m)."""

_ABOVE_FLOOR_M = 0.012
_BACK_M = 0.12
_SLOW_SPEED = 0.6
_SLIPPED_M = 0.04


def find_entry_direction(scene: Scene, target: str) -> np.ndarray | None:
    """Return the horizontal direction in which things can enter the region `target`, float64 [3].

    None if fixed parts of its owner close every side.
    """
    points, middle = _get_owner_points(scene, target), get_origin(scene, target)
    points = points[np.abs(points[:, 2] - middle[2]) < 0.03] - middle
    axes = np.array(scene.data.site(target).xmat).reshape(3, 3).T
    for outwards in (*axes, *-axes):
        ahead = points @ outwards
        sideways = np.linalg.norm(points - ahead[:, None] * outwards, axis=1)
        is_closed = ((ahead > 0.0) & (sideways < 0.06)).any()
        # The roof itself is one of the sides, so that ways from above and below are left out.
        if abs(outwards[2]) < 0.5 and not is_closed:
            return np.asarray(-outwards)
    return None


def put_under_roof(scene: Scene, hand: Hand, name: str, target: str) -> Motion:
    """Grasp `name` on the side that faces out of `target`, carry it in, and let go.

    Raises: `UnreachableError` if `target` is closed on every side, or `name` cannot be grasped.
    """
    inwards = find_entry_direction(scene, target)
    if inwards is None:
        raise UnreachableError(f"{target} has a roof, and is closed on every side")
    grasp, above_bottom_m = _find_front_grasp(scene, name, inwards)
    ahead = np.cos(_TILT) * inwards + np.sin(_TILT) * DOWN
    rotation = get_nearest_turn(get_pointing(ahead, np.cross(inwards, DOWN)), hand.rotation)
    before = grasp - _BEFORE_M * ahead
    yield from approach(scene, hand, before, rotation)
    yield from hand.go(before, rotation, OPEN, tolerance_m=0.006, max_steps=60)
    yield from hand.go(grasp, rotation, OPEN, tolerance_m=0.006)
    yield from hand.hold(CLOSE, 10)

    goal = get_origin(scene, target)
    goal[2] = _get_floor_height(scene, target) + above_bottom_m
    held = hand.position - get_origin(scene, name)
    for action in _carry_inside(scene, hand, name, goal, inwards, rotation):
        yield action
        if np.linalg.norm(hand.position - get_origin(scene, name) - held) > _SLIPPED_M:
            yield from hand.hold(OPEN, 4)
            yield from hand.rise(OPEN)
            return
    yield from hand.hold(OPEN, 10)
    back = hand.position - _BACK_M * ahead
    yield from hand.go(back, rotation, OPEN, tolerance_m=0.02, max_steps=20)


def _carry_inside(
    scene: Scene,
    hand: Hand,
    name: str,
    goal: np.ndarray,
    inwards: np.ndarray,
    rotation: np.ndarray,
) -> Motion:
    """Bring the origin of `name` to the height of `goal`, in front of the opening, in, and down."""
    over = goal - _ABOVE_FLOOR_M * DOWN
    outside = over - _OUTSIDE_M * inwards

    def bring(target: np.ndarray) -> np.ndarray:
        return np.asarray(hand.position + target - get_origin(scene, name))

    lifted = np.array([*hand.position[:2], bring(outside)[2]])
    yield from hand.go(lifted, rotation, CLOSE, tolerance_m=0.01, speed=_SLOW_SPEED)
    yield from hand.go(lambda: bring(outside), rotation, CLOSE, max_steps=60)
    yield from hand.go(lambda: bring(over), rotation, CLOSE, tolerance_m=0.01, speed=_SLOW_SPEED)
    yield from hand.go(lambda: bring(goal), rotation, CLOSE, tolerance_m=0.006, max_steps=15)


def _find_front_grasp(scene: Scene, name: str, inwards: np.ndarray) -> tuple[np.ndarray, float]:
    """Return the grasp of `name`, float64 [3], and the height of its origin above its underside (m).

    The grasp is in the middle of the part that stands out against `inwards`.
    """
    points = get_surface_points(scene, [get_root_body(scene, name)])
    ahead, across = points @ inwards, points @ np.cross(inwards, DOWN)
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
    return middle, float(get_origin(scene, name)[2] - points[:, 2].min())


def _get_floor_height(scene: Scene, target: str) -> float:
    """Return the height of the floor below the middle of `target` (m)."""
    points, middle = _get_owner_points(scene, target), get_origin(scene, target)
    is_below = np.linalg.norm((points - middle)[:, :2], axis=1) < 0.03
    return float(points[is_below & (points[:, 2] < middle[2]), 2].max())


def _get_owner_points(scene: Scene, target: str) -> np.ndarray:
    owner = get_owner(scene, target)
    assert owner is not None
    return get_fixed_points(scene, get_root_body(scene, owner))
