"""Paths on the ground: points every metre, tangents, parallels and curvature."""

import numpy as np
import pytest

from vla_rl.envs.driving.roads import (
    compute_curvatures,
    join_paths,
    make_arc,
    make_bend,
    make_line,
    ring_around,
    shift_path,
    tangents,
)

STRAIGHT = make_line((0.0, 0.0), (10.0, 0.0))


def test_a_line_has_a_point_every_metre_and_both_ends() -> None:
    assert np.allclose(STRAIGHT, np.stack([np.arange(11.0), np.zeros(11)], -1))


def test_joined_paths_have_a_point_every_metre_and_none_twice() -> None:
    path = join_paths(STRAIGHT, make_line((10.0, 0.0), (10.0, 5.0)))
    assert np.allclose(np.hypot(*np.diff(path, axis=0).T), 1.0)
    assert np.allclose(path[[0, 10, 14]], [[0.0, 0.0], [10.0, 0.0], [10.0, 4.0]])


def test_a_path_is_shifted_to_its_own_left() -> None:
    assert np.allclose(shift_path(STRAIGHT, 2.0), STRAIGHT + np.array([0.0, 2.0]))
    back = STRAIGHT[::-1]
    assert np.allclose(shift_path(back, 2.0), back - np.array([0.0, 2.0]))


def test_a_circle_is_as_curved_as_its_radius_says() -> None:
    circle = join_paths(make_arc(np.zeros(2), 20.0, 0.0, np.pi))
    assert compute_curvatures(circle)[5:-5] == pytest.approx(1 / 20.0, rel=0.02)
    assert np.allclose(compute_curvatures(STRAIGHT), 0.0)


def test_a_bend_leaves_and_arrives_in_the_given_directions() -> None:
    curve = make_bend(
        np.zeros(2), np.array([1.0, 0.0]), np.array([10.0, 10.0]), np.array([0.0, 1.0])
    )
    assert np.allclose(curve[[0, -1]], [[0.0, 0.0], [10.0, 10.0]])
    assert np.allclose(tangents(curve)[[0, -1]], [[1.0, 0.0], [0.0, 1.0]], atol=0.2)


def test_a_strip_is_the_ring_around_its_path() -> None:
    ring = ring_around(STRAIGHT, 1.5)
    assert np.allclose(ring, [[0.0, 1.5], [10.0, 1.5], [10.0, -1.5], [0.0, -1.5]])
