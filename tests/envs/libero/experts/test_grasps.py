"""Where the experts grasp, worked out by hand on boxes."""

import numpy as np
import pytest

from vla_rl.envs.libero.experts.picking import choose_grasp, find_pinch_grasps, find_rim_grasps

NOTHING = np.empty((0, 3))


def box(
    half: tuple[float, float, float],
    yaw: float = 0.0,
    middle: tuple[float, float, float] = (0, 0, 0),
) -> np.ndarray:
    """float64 [1, 8, 3], the corners of a box turned about the vertical."""
    signs = np.array([[x, y, z] for x in (-1, 1) for y in (-1, 1) for z in (-1, 1)])
    sine, cosine = np.sin(yaw), np.cos(yaw)
    turn = np.array([[cosine, -sine, 0], [sine, cosine, 0], [0, 0, 1]])
    return np.asarray((signs * half @ turn.T + middle)[None])


def ring(radius: float, height: float) -> np.ndarray:
    """float64 [N, 3], points on a thin upright tube."""
    angles = np.linspace(0, 2 * np.pi, 200, endpoint=False)
    heights = np.linspace(0, height, 20)
    return np.array([[radius * np.cos(a), radius * np.sin(a), z] for a in angles for z in heights])


def test_a_carton_is_grasped_across_its_narrow_side() -> None:
    # 4 x 10 cm, turned by 30 degrees (one of the tried yaws): 4 cm apart, across the carton
    grasp = choose_grasp(
        find_pinch_grasps(box((0.02, 0.05, 0.02), np.pi / 6)), NOTHING, 0.0, lambda _: 0.0
    )
    assert grasp is not None
    assert grasp.width_m == pytest.approx(0.04)
    assert grasp.yaw == pytest.approx(np.pi / 6)
    np.testing.assert_allclose(grasp.position, [0.0, 0.0, 0.0], atol=1e-9)


def test_what_is_wider_than_the_fingers_everywhere_has_no_pinch_grasp() -> None:
    assert find_pinch_grasps(box((0.05, 0.05, 0.05))) == []


def test_a_tube_is_grasped_across_its_wall_all_around() -> None:
    grasps = find_rim_grasps(ring(0.05, 0.06))
    assert len(grasps) == 72
    for grasp in grasps:
        assert np.linalg.norm(grasp.position[:2]) == pytest.approx(0.05, abs=0.001)
        assert grasp.position[2] == pytest.approx(0.06 - 0.018)
        outwards = grasp.position[:2] / 0.05
        assert abs(outwards @ [np.cos(grasp.yaw), np.sin(grasp.yaw)]) == pytest.approx(
            1.0, abs=0.01
        )


def test_a_full_cylinder_has_no_wall() -> None:
    disc = np.concatenate([ring(radius, 0.06) for radius in np.linspace(0.001, 0.05, 20)])
    assert find_rim_grasps(disc) == []


def test_a_neighbour_decides_on_which_side_a_bowl_is_grasped() -> None:
    wall = np.array(
        [[0.09, y, z] for y in np.linspace(-0.2, 0.2, 41) for z in np.linspace(0, 0.2, 21)]
    )
    grasp = choose_grasp(find_rim_grasps(ring(0.05, 0.06)), wall, 0.0, lambda _: 0.0)
    assert grasp is not None
    # the palm reaches 10.8 cm along the fingers and 3.6 cm across: at x = 9 cm there is room only
    # for what is far from it
    assert (
        grasp.position[0] + abs(np.cos(grasp.yaw)) * 0.108 + abs(np.sin(grasp.yaw)) * 0.036 < 0.095
    )
