"""Bench2Drive's files: route sets (.xml), the leaderboard's results, rides and first junctions (.json).

ids = read_route_ids(routes_xml)
require_route_set(ids, "bench2drive220")
records = read_records(results)
table = make_benchmark_table(records, "bench2drive220", ids)
abilities = make_ability_table(records, read_scenario_types(routes_xml), read_first_junctions(junctions))
rides = read_rides(records, folder)
"""

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final
from xml.etree import ElementTree

import numpy as np

from vla_rl.envs.driving.scores.bench2drive import UNPENALISED, FirstJunction, RouteRecord, RouteSet
from vla_rl.envs.driving.scores.comfort import Ride
from vla_rl.util.foreign_data import reading_file

DIGESTS: Final[dict[str, str]] = {
    "f4fdc49680fb0df926f5da59d87d0784883ce9f3153acfb232579f46e8f3ff68": "bench2drive220",
    "e1ccd0e234dc164d77fdf38783b7a4b087dcf5c07306f3fee7085fe5c289509f": "bench2drive_0.0.4_val",
}
"""SHA-256 of a set's sorted route ids, joined by commas, at Bench2Drive 7ec25d1."""

JUNCTIONS_FORMAT: Final = 1
"""Format of the file that `vla_rl_first_junctions.py` writes."""

RIDE_FILE: Final = "metric_info.json"
"""Log of a ride, one entry a tick, in a folder named as the leaderboard's `save_name`."""

FEWEST_TICKS: Final = 5
"""Ticks of the shortest ride whose smoothness is defined: 3 samples at 10 Hz."""

_MESSAGE_ROUNDING: Final = 0.005
"""Percentage points by which the message of an event may differ from what the leaderboard computed
with: it shows two digits."""

_SCORE_ROUNDING: Final = 1e-3
"""Difference of two scores of 0 to 100 that is due to the digits of the file."""

_PERCENT: Final = re.compile(r"(-?[\d.]+)%")
_ROUTE: Final = re.compile(r"RouteScenario_(\d+)")


def read_route_ids(path: Path) -> list[str]:
    """Return the ids of a routes file. Raises: ValueError naming the file."""
    with reading_file(path, " is no file of routes", "give Bench2Drive's file of a route set"):
        found = [route.attrib["id"] for route in ElementTree.parse(path).getroot().iter("route")]
    if not found:
        raise ValueError(f"{path} has no routes, expected Bench2Drive's file of a route set.")
    return found


def read_scenario_types(path: Path) -> dict[str, str]:
    """Return the type of each route's first scenario, by the route's id.

    Raises: ValueError naming the file, and a route without a scenario.
    """
    ids = read_route_ids(path)
    types = {}
    for route_id, route in zip(ids, ElementTree.parse(path).getroot().iter("route"), strict=True):
        scenario = route.find("scenarios/scenario")
        if scenario is None or "type" not in scenario.attrib:
            raise ValueError(
                f"route {route_id} of {path} has no scenario with a type; give Bench2Drive's file."
            )
        types[route_id] = scenario.attrib["type"]
    return types


def read_first_junctions(path: Path) -> dict[str, FirstJunction]:
    """Return the first junction of each route, by the route's id.

    Raises: ValueError naming a file that `vla_rl_first_junctions.py` did not write.
    """
    remedy = "write it with vla_rl_first_junctions.py, from `vla-rl export carla`"
    with reading_file(path, " holds no first junctions", remedy):
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["format"] != JUNCTIONS_FORMAT:
            raise ValueError(f"its format is {found['format']}, expected {JUNCTIONS_FORMAT}")
        return {
            route_id: FirstJunction(each["point"], each["num_points"])
            for route_id, each in found["routes"].items()
        }


def read_rides(records: Sequence[RouteRecord], folder: Path) -> list[Ride]:
    """Return the ride of each record, as an agent logged it.

    Raises: ValueError naming a record without a ride, or a damaged file.
    """
    rides = []
    for record in records:
        path = folder / record.save_name / RIDE_FILE
        with reading_file(
            path,
            f" is no log of the ride of route {record.route_id}",
            "set the agent's `rides`, and give that folder",
        ):
            ticks = list(json.loads(path.read_text(encoding="utf-8")).values())
            if len(ticks) < FEWEST_TICKS:
                raise ValueError(f"it has {len(ticks)} ticks, expected at least {FEWEST_TICKS}")
            rides.append(
                Ride(
                    acceleration=_stack_column(ticks, "acceleration")[:, :2],
                    forward=_stack_column(ticks, "forward_vector")[:, :2],
                    right=_stack_column(ticks, "right_vector")[:, :2],
                    # CARLA's turns are in degrees per second; the published tool reads them as they
                    # are
                    yaw_rate=_stack_column(ticks, "angular_velocity")[:, 2],
                )
            )
    return rides


def _stack_column(ticks: Sequence[Mapping[str, Sequence[float]]], name: str) -> np.ndarray:
    return np.array([tick[name] for tick in ticks], np.float64)


def require_route_set(ids: Sequence[str], named: RouteSet) -> None:
    """Check that a routes file is of the set that a table names. Raises: ValueError if not."""
    joined = ",".join(map(str, sorted(map(int, ids))))
    found = DIGESTS.get(hashlib.sha256(joined.encode()).hexdigest(), "no known route set")
    if found != named:
        raise ValueError(
            f"the {len(ids)} routes are {found}, but the table names {named}; tables of different "
            "sets do not compare, so name the set that was driven."
        )


def read_records(paths: Sequence[Path]) -> list[RouteRecord]:
    """Return the records of all results files. Raises: ValueError naming a damaged file."""
    records = []
    for path in paths:
        with reading_file(
            path,
            " holds no results of the leaderboard",
            "give the file as the leaderboard wrote it",
        ):
            found = json.loads(path.read_text(encoding="utf-8"))["_checkpoint"]["records"]
            records += [parse_record(record) for record in found]
    return records


def parse_record(record: Mapping[str, Any]) -> RouteRecord:
    """Return one record of the leaderboard, with its own score if it has one.

    Raises: ValueError, also if that score is not what the record's events give; KeyError; TypeError;
    AttributeError.
    """
    route = _ROUTE.match(record["route_id"])
    if route is None:
        raise ValueError(f"route_id is {record['route_id']!r}, expected RouteScenario_<id>_rep<n>.")
    events: Mapping[str, Sequence[str]] = record["infractions"]
    outside = [_parse_percent(message) for message in events.get("outside_route_lanes", ())]
    # the leaderboard multiplies a factor for each event, so that two of 50 % leave a quarter
    kept = math.prod(1.0 - share / 100.0 for share in outside)
    composed = record["scores"].get("score_composed")
    found = RouteRecord(
        route_id=route[1],
        status=record["status"],
        completion=float(record["scores"]["score_route"]),
        infractions={kind: len(of_kind) for kind, of_kind in events.items() if kind != UNPENALISED},
        outside_route=100.0 * (1.0 - kept),
        speeds=[_parse_percent(message) for message in events.get(UNPENALISED, ())],
        save_name=record.get("save_name", ""),
        composed=None if composed is None else float(composed),
    )
    # the file's own score counts, because its messages are rounded; one that its events do not
    # explain is of another release of the leaderboard, or of a damaged file
    tolerance = _SCORE_ROUNDING + found.completion * len(outside) * _MESSAGE_ROUNDING / 100.0
    if not abs(found.driving_score - found.recomputed_score) <= tolerance:
        raise ValueError(
            f"score_composed of route {found.route_id} is {composed}, but its completion and events "
            f"give {found.recomputed_score:.6g}, expected the same; give the results as the "
            "leaderboard of Bench2Drive 0.0.4 wrote them."
        )
    return found


def _parse_percent(message: str) -> float:
    found = _PERCENT.search(message)
    if found is None:
        raise ValueError(f"an event says {message!r}, expected a percentage in it.")
    return float(found[1])
