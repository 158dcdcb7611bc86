"""Bench2Drive's routes and results as files."""

import hashlib
import json
from pathlib import Path

import pytest

from vla_rl.driving_scores.bench2drive import table_of
from vla_rl.driving_scores.leaderboard_files import (
    DIGESTS,
    read_records,
    require_route_set,
    route_ids,
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
    table = table_of([record], "bench2drive220", ["1711", "1773"])
    assert table.driving_score == pytest.approx(54.0 / 220)


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
            route_ids(routes)


def test_a_route_set_that_is_not_the_one_that_the_table_names_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    routes = tmp_path / "routes.xml"
    routes.write_text('<routes><route id="20" town="a"/><route id="3" town="b"/></routes>')
    ids = route_ids(routes)
    assert ids == ["20", "3"]
    with pytest.raises(ValueError, match="2 routes are no known route set, but the table names"):
        require_route_set(ids, "bench2drive220")
    digest = hashlib.sha256(b"3,20").hexdigest()
    monkeypatch.setitem(DIGESTS, digest, "bench2drive_0.0.4_val")
    require_route_set(ids, "bench2drive_0.0.4_val")
    with pytest.raises(ValueError, match="but the table names bench2drive220"):
        require_route_set(ids, "bench2drive220")
