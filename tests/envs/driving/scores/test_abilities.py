"""Bench2Drive's multi-ability: equal to the benchmark's tool, and worked out by hand."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.envs.driving.scores.drawn_routes import draw_routes
from vla_rl.envs.driving.scores.bench2drive import (
    SCENARIO_TYPES,
    FirstJunction,
    RouteRecord,
    make_ability_table,
)

GOLDEN: list[dict[str, Any]] = json.loads(
    (Path(__file__).parent / "golden" / "abilities.json").read_text()
)
TYPES = {"1": "Accident", "2": "BlockedIntersection", "3": "T_Junction"}
JUNCTIONS = {route_id: FirstJunction(12, 100) for route_id in TYPES}
"""The rule decides at 20 points: (12 + 8) / 100."""


@pytest.mark.parametrize("seed", range(len(GOLDEN)))
def test_abilities_equal_the_tool_of_bench2drive(seed: int) -> None:
    types, junctions, records = draw_routes(seed)
    table = make_ability_table(records, types, junctions)
    ratios = {name: each.success_ratio for name, each in table.abilities.items()}
    assert ratios == {name: GOLDEN[seed][name] for name in SCENARIO_TYPES}
    assert table.mean == GOLDEN[seed]["mean"]
    assert sorted(table.left_out) == GOLDEN[seed]["left_out"]


def test_the_benchmark_has_44_types_of_which_14_count_in_two_abilities() -> None:
    sizes = {name: len(types) for name, types in SCENARIO_TYPES.items()}
    assert sizes == {
        "overtaking": 9,
        "merging": 16,
        "emergency_brake": 12,
        "give_way": 2,
        "traffic_signs": 19,
    }
    assert len(set().union(*SCENARIO_TYPES.values())) == 44


def test_a_failure_behind_the_first_junction_is_a_success_of_traffic_signs_alone() -> None:
    crash = RouteRecord("2", "Failed", 20.1, {"collisions_vehicle": 1})
    abilities = make_ability_table([crash], TYPES, JUNCTIONS).abilities
    assert abilities["traffic_signs"].success_ratio == 1.0
    assert abilities["emergency_brake"].success_ratio == 0.0


@pytest.mark.parametrize(
    ("completion", "infractions"),
    [(20.0, {}), (90.0, {"red_light": 1}), (90.0, {"stop_infraction": 1})],
)
def test_a_failure_at_the_junction_or_with_a_broken_sign_stays_one(
    completion: float, infractions: dict[str, int]
) -> None:
    record = RouteRecord("3", "Failed", completion, infractions)
    assert (
        make_ability_table([record], TYPES, JUNCTIONS).abilities["traffic_signs"].success_ratio == 0
    )


def test_routes_that_were_not_driven_are_left_out_and_leave_the_mean_open() -> None:
    table = make_ability_table([RouteRecord("1", "Perfect", 100.0)], TYPES, JUNCTIONS)
    assert table.abilities["overtaking"].success_ratio == 1.0
    assert table.abilities["give_way"].success_ratio is None
    assert table.mean is None
    assert table.left_out == ["2", "3"]


def test_first_junctions_and_records_of_other_routes_are_named() -> None:
    record = RouteRecord("3", "Failed", 50.0)
    with pytest.raises(ValueError, match=r"lack routes \['1'\] and have routes \['9'\]"):
        make_ability_table(
            [record], TYPES, {**dict(list(JUNCTIONS.items())[1:]), "9": JUNCTIONS["1"]}
        )
    with pytest.raises(ValueError, match=r"routes \['9'\] are not in the routes file"):
        make_ability_table([RouteRecord("9", "Failed", 50.0)], TYPES, JUNCTIONS)
    with pytest.raises(ValueError, match="recorded twice"):
        make_ability_table([record, record], TYPES, JUNCTIONS)


def test_a_failed_route_of_traffic_signs_without_a_junction_is_named() -> None:
    junctions = {**JUNCTIONS, "3": FirstJunction(None, 100)}
    with pytest.raises(ValueError, match="route 3 has no junction on CARLA's map"):
        make_ability_table([RouteRecord("3", "Failed", 50.0)], TYPES, junctions)
    passed = make_ability_table([RouteRecord("3", "Perfect", 100.0)], TYPES, junctions)
    assert passed.abilities["traffic_signs"].success_ratio == 1.0


def test_a_junction_beyond_its_route_is_refused() -> None:
    with pytest.raises(ValueError, match="point 101 of 100"):
        FirstJunction(101, 100)
