"""Grasps, clearances, motions of the hand, the order of goals: figures worked out by hand."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from vla_rl.envs.libero.experts.geometry import get_highest_on_way, get_lowest_height
from vla_rl.envs.libero.experts.motions import (
    Goal,
    get_nearest_turn,
    get_pointing,
    get_pointing_down,
    make_command,
    read_goals,
)
from vla_rl.envs.libero.experts.picking import (
    choose_grasp,
    find_pinch_grasps,
    find_rim_grasps,
    get_nearest_half_turn,
)

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


def test_the_palm_stays_above_what_is_below_it() -> None:
    post = np.array([[0.08, 0.0, 0.3]])
    assert get_lowest_height(post, np.zeros(2), yaw=0.0) == pytest.approx(0.3 - 0.028)
    assert get_lowest_height(post, np.zeros(2), yaw=np.pi / 2) == -np.inf


def test_the_way_is_as_high_as_what_stands_near_it() -> None:
    cloud = np.array([[0.5, 0.05, 0.7], [0.5, 0.3, 0.9]])
    assert get_highest_on_way(cloud, np.zeros(3), np.array([1.0, 0.0, 0.0]), 0.1) == 0.7


def test_the_hand_points_where_it_is_told_and_turns_the_short_way() -> None:
    rotation = get_pointing(np.array([0.0, -2.0, 0.0]), np.array([0.0, 0.3, 1.0]))
    np.testing.assert_allclose(rotation[:, 2], [0, -1, 0])
    np.testing.assert_allclose(rotation[:, 0], [0, 0, 1], atol=1e-12)
    assert np.linalg.det(rotation) == pytest.approx(1.0)
    np.testing.assert_allclose(
        get_nearest_turn(get_pointing_down(np.pi), get_pointing_down(0.0)),
        get_pointing_down(0.0),
        atol=1e-12,
    )
    assert get_nearest_half_turn(3.0) == pytest.approx(3.0 - np.pi)


def test_a_command_is_proportional_and_clipped() -> None:
    action = make_command(np.array([0.01, -1.0, 0.0]), np.array([0.0, 0.0, 0.25]), 1.0)
    # 2.6 / 5 cm of 1 cm is 0.52, 1.2 / 0.5 rad of 0.25 rad is 0.6
    np.testing.assert_allclose(action, [0.52, -1.0, 0.0, 0.0, 0.0, 0.6, 1.0], atol=1e-6)
    assert action.dtype == np.float32


def scene(*conditions: list[str], met: tuple[list[str], ...] = ()) -> Any:
    """Return what the goals read of a scene."""
    domain = SimpleNamespace(
        parsed_problem={"goal_state": list(conditions)},
        _eval_predicate=lambda parts: parts in met,
    )
    return SimpleNamespace(domain=domain)


def test_switches_and_doors_come_before_things_and_closing_last() -> None:
    found = read_goals(
        scene(["close", "drawer"], ["on", "bowl", "plate"], ["open", "drawer"], ["turnon", "stove"])
    )
    assert [goal.predicate for goal in found] == ["turnon", "open", "on", "close"]
    assert found[2] == Goal("on", "bowl", "plate")
    assert found[0].target is None


def test_conditions_of_one_kind_keep_the_order_of_the_file() -> None:
    found = read_goals(scene(["in", "b", "basket"], ["on", "a", "plate"]))
    assert [goal.subject for goal in found] == ["b", "a"]


def test_an_unknown_condition_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"has the conditions \['stack'\], expected only turnon"):
        read_goals(scene(["stack", "a", "b"], ["on", "a", "b"]))


def test_a_goal_is_met_where_the_simulator_says_so() -> None:
    here = scene(["open", "drawer"], ["on", "a", "b"], met=(["open", "drawer"],))
    opened, placed = read_goals(here)
    assert opened.is_met(here)
    assert not placed.is_met(here)
