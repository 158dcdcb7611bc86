"""Bench2Drive's table from records that are worked out by hand."""

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.envs.driving.scores.drawn import draw_routes
from vla_rl.envs.driving.scores.bench2drive import (
    SCENARIO_TYPES,
    FirstJunction,
    RouteRecord,
    make_ability_table,
    make_benchmark_table,
)
from vla_rl.envs.driving.scores.comfort import (
    Ride,
    comfort_as_published,
    comfort_corrected,
    compute_smoothness,
)
from vla_rl.envs.driving.scores.geometry import Floats, directions, turn_left
from vla_rl.envs.driving.scores.leaderboard_files import (
    DIGESTS,
    read_first_junctions,
    read_records,
    read_rides,
    read_route_ids,
    read_scenario_types,
    require_route_set,
)
from vla_rl.envs.driving.scores.scene import AX, AY, HEADING, YAW_RATE


def make_ride(states: Floats) -> Ride:
    """Return a motion [T, 11] as CARLA would record it."""
    forward = directions(states[:, HEADING])
    left = turn_left(forward)
    accel = states[:, AX, None] * forward + states[:, AY, None] * left
    mirror = np.array([1.0, -1.0])
    return Ride(
        acceleration=accel * mirror,
        forward=forward * mirror,
        right=-left * mirror,
        yaw_rate=-np.rad2deg(states[:, YAW_RATE]),
    )


def test_penalties_multiply_for_each_event() -> None:
    crash = RouteRecord("1", "Completed", 100.0, {"collisions_vehicle": 2, "red_light": 1})
    assert crash.driving_score == pytest.approx(100 * 0.6 * 0.6 * 0.7)
    assert not crash.is_success
    off = RouteRecord("2", "Failed - Agent deviated from the route", 40.0, outside_route=25.0)
    assert off.driving_score == pytest.approx(30.0)
    assert not off.is_success


def test_only_min_speed_events_leave_the_success() -> None:
    slow = RouteRecord("1", "Completed", 100.0, speeds=(50.0, 150.0, 2000.0))
    assert slow.is_success
    assert slow.driving_score == 100.0
    assert slow.efficiency == 100.0
    assert RouteRecord("2", "Perfect", 100.0, speeds=(1500.0,)).efficiency is None


def test_missing_routes_count_as_0_of_220() -> None:
    records = [RouteRecord("1", "Perfect", 100.0), RouteRecord("2", "Failed", 10.0)]
    table = make_benchmark_table(records, "bench2drive220")
    assert table.driving_score == pytest.approx(110 / 220)
    assert table.success_rate == pytest.approx(1 / 220)
    assert (table.num_routes, table.efficiency) == (2, None)


def test_routes_of_another_set_and_routes_driven_twice_are_refused() -> None:
    one = RouteRecord("7", "Perfect", 100.0)
    with pytest.raises(ValueError, match="not of bench2drive220"):
        make_benchmark_table([one], "bench2drive220", route_ids=("1", "2"))
    with pytest.raises(ValueError, match="twice"):
        make_benchmark_table([one, one], "bench2drive220")


def test_a_gentle_turn_fails_as_published_and_passes_corrected() -> None:
    # 4 m/s at 0.2 rad/s is 11 degrees/s, which the benchmark compares with 0.95
    states = np.zeros((60, 11))
    states[:, 2] = 0.2 * np.arange(60) * 0.1
    states[:, 3], states[:, 6], states[:, 9] = 4.0, 0.8, 0.2
    ride = make_ride(states)
    assert comfort_as_published(ride) == 0.0
    assert comfort_corrected(ride) == 1.0


def test_a_short_last_segment_is_left_out() -> None:
    states = np.zeros((59, 11))
    states[:, 3] = 5.0
    states[41:, 5] = 6.0
    calm = make_ride(states)
    assert comfort_corrected(calm) == 1.0
    whole = Ride(*(np.concatenate([part, part[-1:]]) for part in vars(calm).values()))
    assert comfort_corrected(whole) == pytest.approx(2 / 3)


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


RECORD = {
    "route_id": "RouteScenario_1711_rep0",
    "status": "Completed",
    "scores": {"score_route": 100.0, "score_penalty": 0.54, "score_composed": 54.0},
    "infractions": {
        "collisions_vehicle": ["Agent collided against object with type=vehicle"],
        "red_light": [],
        "outside_route_lanes": [
            "Agent went outside its route lanes for about 7.5 meters (10.0% of the completed route)"
        ],
        "min_speed_infractions": [
            "Average speed is 80.0% of the surrounding traffic's one",
            "Average speed is 120.0% of the surrounding traffic's one",
        ],
    },
}


def test_the_leaderboards_results_are_read_with_their_events(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_text(json.dumps({"_checkpoint": {"records": [RECORD]}}))
    (record,) = read_records([path])
    assert record.driving_score == pytest.approx(54.0)  # 100 * .6 * .9, as the leaderboard's
    assert (record.route_id, record.is_success, record.efficiency) == ("1711", False, 100.0)
    table = make_benchmark_table([record], "bench2drive220", ["1711", "1773"])
    assert table.driving_score == pytest.approx(54.0 / 220)


def record_with(outside: list[str], composed: float | None, completion: float = 100.0) -> object:
    events = [
        f"Agent went outside its route lanes for 1 meter ({share}% of it)" for share in outside
    ]
    scores = {"score_route": completion, "score_penalty": 1.0}
    return {
        **RECORD,
        "scores": scores if composed is None else {**scores, "score_composed": composed},
        "infractions": {"outside_route_lanes": events},
    }


def read(tmp_path: Path, record: object) -> RouteRecord:
    path = tmp_path / "results.json"
    path.write_text(json.dumps({"_checkpoint": {"records": [record]}}))
    (found,) = read_records([path])
    return found


def test_the_leaderboards_own_score_counts_and_not_the_one_of_its_rounded_messages(
    tmp_path: Path,
) -> None:
    # 33.333 % outside: the leaderboard computed 66.667, its message says 33.33
    found = read(tmp_path, record_with(["33.33"], 66.667))
    assert (found.driving_score, found.recomputed_score) == (66.667, pytest.approx(66.67))
    assert make_benchmark_table([found], "bench2drive220").driving_score == pytest.approx(
        66.667 / 220
    )


@pytest.mark.parametrize("composed", [None, 63.0])
def test_each_drive_outside_of_the_lanes_multiplies(tmp_path: Path, composed: float | None) -> None:
    found = read(tmp_path, record_with(["10.0", "30.0"], composed))  # 100 * .9 * .7
    assert found.driving_score == pytest.approx(63.0)


def test_a_drive_outside_of_the_lanes_that_rounds_to_nothing_is_no_success(tmp_path: Path) -> None:
    found = read(tmp_path, record_with(["0.0"], 99.9996))
    assert (found.driving_score, found.is_success) == (99.9996, False)


@pytest.mark.parametrize("composed", [90.0, 62.9, float("nan")])
def test_a_score_that_its_events_do_not_give_is_refused(tmp_path: Path, composed: float) -> None:
    with pytest.raises(
        ValueError, match=r"results\.json.*score_composed of route 1711 is.*give 63"
    ):
        read(tmp_path, record_with(["10.0", "30.0"], composed))


def test_damaged_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    for text in ("", "{}", json.dumps({"_checkpoint": {"records": [{**RECORD, "route_id": "x"}]}})):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"results\.json holds no results"):
            read_records([path])
    routes = tmp_path / "routes.xml"
    for text, why in (("nothing", "no file of routes"), ("<routes/>", "has no routes")):
        routes.write_text(text)
        with pytest.raises(ValueError, match=why):
            read_route_ids(routes)


def test_a_route_set_that_is_not_the_one_that_the_table_names_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    routes = tmp_path / "routes.xml"
    routes.write_text('<routes><route id="20" town="a"/><route id="3" town="b"/></routes>')
    ids = read_route_ids(routes)
    assert ids == ["20", "3"]
    with pytest.raises(ValueError, match="2 routes are no known route set, but the table names"):
        require_route_set(ids, "bench2drive220")
    digest = hashlib.sha256(b"3,20").hexdigest()
    monkeypatch.setitem(DIGESTS, digest, "bench2drive_0.0.4_val")
    require_route_set(ids, "bench2drive_0.0.4_val")
    with pytest.raises(ValueError, match="but the table names bench2drive220"):
        require_route_set(ids, "bench2drive220")


def test_the_first_scenario_of_a_route_is_its_type(tmp_path: Path) -> None:
    routes = tmp_path / "routes.xml"
    both = '<scenario type="Accident"/><scenario type="T_Junction"/>'
    routes.write_text(f'<routes><route id="3"><scenarios>{both}</scenarios></route></routes>')
    assert read_scenario_types(routes) == {"3": "Accident"}
    routes.write_text('<routes><route id="3"/></routes>')
    with pytest.raises(ValueError, match=r"route 3 of .*routes\.xml has no scenario"):
        read_scenario_types(routes)


def test_files_that_hold_no_first_junctions_are_named(tmp_path: Path) -> None:
    path = tmp_path / "junctions.json"
    for text, why in (
        ("", "no first junctions"),
        ("[]", "no first junctions"),
        ('{"format": 2, "routes": {}}', "its format is 2, expected 1"),
        ('{"format": 1, "routes": {"3": {"point": 4}}}', "num_points"),
        ('{"format": 1, "routes": {"3": {"point": 9, "num_points": 4}}}', "point 9 of 4"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=why):
            read_first_junctions(path)


def write_ride(folder: Path, degrees_per_s: float, num_ticks: int = 80) -> None:
    """Write the log of a ride at 20 Hz that turns right at a steady rate and 5 m/s."""
    rate = math.radians(degrees_per_s)
    ride = {}
    for tick in range(num_ticks):
        yaw = rate * tick / 20
        ahead = [math.cos(yaw), math.sin(yaw), 0.0]
        right = [-math.sin(yaw), math.cos(yaw), 0.0]
        ride[tick] = {
            "acceleration": [5.0 * rate * part for part in right],
            "angular_velocity": [0.0, 0.0, degrees_per_s],
            "forward_vector": ahead,
            "right_vector": right,
        }
    folder.mkdir()
    (folder / "metric_info.json").write_text(json.dumps(ride))


def test_rides_that_agents_logged_are_graded_both_ways(tmp_path: Path) -> None:
    write_ride(tmp_path / "straight", 0.0)
    write_ride(tmp_path / "turning", 10.0)
    records = [
        RouteRecord(name, "Perfect", 100.0, save_name=name) for name in ("straight", "turning")
    ]
    smoothness = compute_smoothness(read_rides(records, tmp_path))
    # the tool compares 10 degrees/s with 0.95 rad/s
    assert (smoothness.as_published, smoothness.corrected) == (0.5, 1.0)


def test_a_missing_ride_and_one_that_is_too_short_are_named(tmp_path: Path) -> None:
    record = RouteRecord("1711", "Perfect", 100.0, save_name="gone")
    with pytest.raises(ValueError, match="no log of the ride of route 1711"):
        read_rides([record], tmp_path)
    write_ride(tmp_path / "gone", 0.0, num_ticks=4)
    with pytest.raises(ValueError, match="it has 4 ticks, expected at least 5"):
        read_rides([record], tmp_path)
    with pytest.raises(ValueError, match="there is no ride"):
        compute_smoothness([])
