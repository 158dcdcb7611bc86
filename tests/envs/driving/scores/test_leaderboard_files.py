"""Bench2Drive's routes and results as files."""

import hashlib
import json
import math
from pathlib import Path

import pytest

from vla_rl.envs.driving.scores.bench2drive import RouteRecord, make_benchmark_table
from vla_rl.envs.driving.scores.comfort import compute_smoothness
from vla_rl.envs.driving.scores.leaderboard_files import (
    DIGESTS,
    read_first_junctions,
    read_records,
    read_rides,
    read_route_ids,
    read_scenario_types,
    require_route_set,
)

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
