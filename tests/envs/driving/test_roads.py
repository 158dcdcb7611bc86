"""Roads are noted as polygons for the scores and as lines to draw."""

import numpy as np

from vla_rl.envs.driving.roads import LANE_WIDTH, Roads

STRAIGHT = np.stack([np.arange(0.0, 20.0), np.zeros(20)], axis=1)


def made() -> Roads:
    return Roads(command="straight", speed_limit=10.0, route=STRAIGHT)


def test_a_lane_lies_on_a_road_that_is_no_part_of_the_route() -> None:
    roads = made()
    roads.add_lane(STRAIGHT, on_route=True)
    assert (roads.layers, roads.on_route) == (["lane", "roadblock"], [True, False])
    lane, road = (np.ptp(ring[:, 1]) for ring in roads.rings)
    assert np.isclose(lane, LANE_WIDTH)
    assert road > lane


def test_lines_stand_at_half_a_lane_to_the_left_and_to_the_right() -> None:
    roads = made()
    roads.draw_edges(STRAIGHT, left_dashed=True, right_dashed=False)
    (left,), (right,) = roads.dashed, roads.solid
    assert np.allclose(left[:, 1], LANE_WIDTH / 2)
    assert np.allclose(right[:, 1], -LANE_WIDTH / 2)


def test_the_map_has_every_polygon_with_its_layer() -> None:
    roads = made()
    roads.add_lane(STRAIGHT, on_route=False)
    found = roads.as_map()
    assert len(found.rings) == len(found.layers) == len(found.on_route) == 2
