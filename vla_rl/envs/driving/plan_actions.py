"""The ways in which eight rows of three numbers are a plan of 4 s: `moves`, `profiles` and
`along_route`.
"""

from typing import Literal, get_args

import numpy as np

from vla_rl.envs.driving import along_route, moves, profiles
from vla_rl.envs.driving.paths import Floats

PlanAction = Literal["moves", "profiles", "along_route"]
"""`moves`: row k is the move from waypoint k to the next. `profiles`: row k has the k-th coefficient of
the accelerations and of the sideways shifts, and the bearing of the path at the k-th distance.
`along_route`: the same, with the shift beside the route at the k-th distance instead of a bearing."""


def checked_action(action: PlanAction) -> PlanAction:
    """Return the way of planning. Raises: ValueError for another word."""
    if action not in get_args(PlanAction):
        raise ValueError(
            f"action is {action!r}, expected one of {', '.join(get_args(PlanAction))}."
        )
    return action


def waypoints_of_plan(
    rows: np.ndarray, action: PlanAction, speed: float, route: np.ndarray | None
) -> Floats:
    """Return x, y and heading of each waypoint in the car's frame: float64 [8, 3].

    Args:
        rows: [8, 3] in [-1, 1].
        speed: present speed in m/s, the first number of an observation's `state`.
        route: [10, 2], an observation's `route`, if it has one; `along_route` needs it.
    """
    if action == "moves":
        return moves.waypoints_of_actions(rows)
    if action == "along_route":
        return along_route.waypoints_along_route(rows, speed, _known(route))
    return profiles.waypoints_of_profiles(rows, speed)


def plan_of_poses(
    poses: Floats, path: Floats, action: PlanAction, speed: float, route: np.ndarray | None
) -> np.ndarray:
    """Return the rows that follow poses: float32 [8, 3].

    Args:
        poses: [9, 3], now and at 0.5 to 4.0 s, of any frame.
        path: [K, 3], as `profiles_of_poses`'s.
        speed: present speed in m/s.
        route: as `waypoints_of_plan`'s.
    """
    if action == "moves":
        return moves.actions_of_poses(poses)
    if action == "along_route":
        return along_route.plan_along_route(poses, speed, _known(route))
    return profiles.profiles_of_poses(poses, path, speed)


def _known(route: np.ndarray | None) -> np.ndarray:
    if route is None:
        raise ValueError(
            "action is 'along_route', but the observation has no route, expected moves or profiles."
        )
    return route
