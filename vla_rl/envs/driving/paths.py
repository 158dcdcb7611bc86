"""Paths on the ground and the strips of road around them: float64 [K, 2], metres."""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def line(start: tuple[float, float], end: tuple[float, float]) -> Floats:
    """Return a straight path with a point every metre or so."""
    count = max(int(np.hypot(end[0] - start[0], end[1] - start[1])) + 1, 2)
    return np.linspace(start, end, count)


def bend(start: Floats, start_way: Floats, end: Floats, end_way: Floats) -> Floats:
    """Return a cubic Bezier curve that leaves along `start_way` and arrives along `end_way`."""
    reach = 0.55 * float(np.linalg.norm(end - start))
    corners = np.stack([start, start + start_way * reach / 1.4, end - end_way * reach / 1.4, end])
    t = np.linspace(0.0, 1.0, max(int(reach * 2), 8))[:, None]
    weights = np.concatenate([(1 - t) ** 3, 3 * t * (1 - t) ** 2, 3 * t**2 * (1 - t), t**3], 1)
    curve: Floats = weights @ corners
    return curve


def arc(centre: Floats, radius: float, start: float, end: float) -> Floats:
    """Return the arc between two angles."""
    count = max(int(abs(end - start) * radius) + 1, 4)
    angles = np.linspace(start, end, count)
    return centre + radius * np.stack([np.cos(angles), np.sin(angles)], -1)


def joined(*parts: Floats) -> Floats:
    """Join paths that follow each other, with a point every metre."""
    return resampled(np.concatenate(parts))


def resampled(path: Floats) -> Floats:
    """Return the path with a point every metre from its start."""
    lengths = np.hypot(*np.diff(path, axis=0).T)
    kept = np.concatenate([[True], lengths > 1e-6])
    path = path[kept]
    along = np.concatenate([[0.0], np.cumsum(np.hypot(*np.diff(path, axis=0).T))])
    wanted = np.arange(0.0, along[-1], 1.0)
    return np.stack([np.interp(wanted, along, path[:, axis]) for axis in (0, 1)], -1)


def ways(path: Floats) -> Floats:
    """Return the unit tangents of a path: [K, 2]."""
    steps = np.gradient(path, axis=0)
    return np.asarray(steps / np.maximum(np.linalg.norm(steps, axis=-1, keepdims=True), 1e-9))


def shifted(path: Floats, left: float) -> Floats:
    """Return the path moved to its left by `left` metres."""
    unit = ways(path)
    return path + left * np.stack([-unit[:, 1], unit[:, 0]], -1)


def strip(path: Floats, half_width: float) -> Floats:
    """Return the ring of corners around a path."""
    left, right = shifted(path, half_width), shifted(path, -half_width)
    turns = np.abs(np.diff(np.diff(path, axis=0), axis=0)).max(-1) > 1e-6
    # points in the middle of a straight piece add nothing but time to every comparison
    kept = np.concatenate([[True], turns & (np.arange(len(turns)) % 2 == 0), [True]])
    return np.concatenate([left[kept], right[kept][::-1]])


def curvatures(path: Floats) -> Floats:
    """Return the absolute curvature at each point of a path with a point every metre."""
    unit = ways(path)
    headings = np.unwrap(np.arctan2(unit[:, 1], unit[:, 0]))
    return np.asarray(np.abs(np.gradient(headings)))
