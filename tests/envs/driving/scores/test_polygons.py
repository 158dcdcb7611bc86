"""Which rings are polygons: all that do not cross themselves, however their corners are rounded."""

import numpy as np
import pytest

from vla_rl.envs.driving.scores.geometry import Polygons


def lane(corners_a_side: int, turn: float, centre: np.ndarray) -> np.ndarray:
    """Return a rectangle of 60 m x 3.5 m with several corners on each long side, turned."""
    along = np.linspace(-30.0, 30.0, corners_a_side)
    ring = np.concatenate(
        [
            np.stack([along, np.full(corners_a_side, -1.75)], 1),
            np.stack([along[::-1], np.full(corners_a_side, 1.75)], 1),
        ]
    )
    turned = np.array([[np.cos(turn), -np.sin(turn)], [np.sin(turn), np.cos(turn)]])
    return np.asarray(ring @ turned.T + centre)


def test_a_long_straight_lane_is_a_polygon_at_any_turn() -> None:
    assert len(Polygons([lane(6, 2.322, np.zeros(2))])) == 1


@pytest.mark.parametrize("reach_m", [50.0, 5_000.0, 1e6])
def test_lanes_of_many_corners_are_polygons_wherever_they_are(reach_m: float) -> None:
    rng = np.random.default_rng(0)
    for corners in (6, 12, 30, 60):
        for _ in range(40):
            centre = rng.uniform(-reach_m, reach_m, 2)
            ring = lane(corners, rng.uniform(0.0, 2 * np.pi), centre)
            (inside, outside) = Polygons([ring]).contain(np.stack([centre, centre + 100.0]))[0]
            assert (inside, outside) == (True, False)


@pytest.mark.parametrize("reach_m", [0.0, 50.0, 1e6])
def test_a_ring_that_crosses_itself_is_refused_at_any_turn(reach_m: float) -> None:
    rng = np.random.default_rng(1)
    for corners in (2, 6, 30):
        for _ in range(20):
            ring = lane(corners, rng.uniform(0.0, 2 * np.pi), rng.uniform(-1, 1, 2) * reach_m)
            ring[[0, corners - 1]] = ring[[corners - 1, 0]]  # a bow tie, or one spike across
            with pytest.raises(ValueError, match="polygon 0 crosses itself"):
                Polygons([ring])


@pytest.mark.parametrize("depth_m", [1e-3, 1e-6, 1e-9])
def test_a_crossing_far_smaller_than_a_car_is_still_refused(depth_m: float) -> None:
    # the last corner reaches over the lower side by a little
    ring = np.array([[0.0, 0.0], [10.0, 0.0], [10.0, 5.0], [6.0, -depth_m], [4.0, 5.0], [0.0, 5.0]])
    with pytest.raises(ValueError, match="crosses itself"):
        Polygons([ring])
