"""The action `waypoints`: eight moves of 0.5 s, scaled to [-1, 1], and the trajectory they make."""

from typing import Final

import numpy as np

NUM_WAYPOINTS: Final = 8
LOW: Final = np.array([-1.0, -1.5, -0.6])
HIGH: Final = np.array([8.0, 1.5, 0.6])
"""The moves at -1 and at 1: metres ahead, metres to the left, radians to the left."""


def waypoints_of_actions(actions: np.ndarray) -> np.ndarray:
    """Return x, y and heading of each waypoint in the car's frame: float64 [K, 3].

    Args:
        actions: [K, 3] in [-1, 1]; each is a move in the frame of the waypoint before it.
    """
    moves = LOW + (np.clip(actions, -1.0, 1.0) + 1.0) / 2.0 * (HIGH - LOW)
    pose = np.zeros(3)
    waypoints = np.empty((len(moves), 3))
    for number, (ahead, left, turn) in enumerate(moves):
        cos, sin = np.cos(pose[2]), np.sin(pose[2])
        pose = pose + np.array([cos * ahead - sin * left, sin * ahead + cos * left, turn])
        waypoints[number] = pose
    return waypoints


def actions_of_poses(poses: np.ndarray) -> np.ndarray:
    """Return the actions that move along poses [K + 1, 3] of any frame: float32 [K, 3].

    Moves beyond the bounds are clipped.
    """
    steps = np.diff(poses, axis=0)
    cos, sin = np.cos(poses[:-1, 2]), np.sin(poses[:-1, 2])
    ahead = cos * steps[:, 0] + sin * steps[:, 1]
    left = cos * steps[:, 1] - sin * steps[:, 0]
    turn = (steps[:, 2] + np.pi) % (2 * np.pi) - np.pi
    scaled = 2.0 * (np.stack([ahead, left, turn], -1) - LOW) / (HIGH - LOW) - 1.0
    return np.asarray(np.clip(scaled, -1.0, 1.0), np.float32)
