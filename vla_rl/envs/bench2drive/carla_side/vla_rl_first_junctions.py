"""Write the first junction of each route, which Bench2Drive's multi-ability needs of CARLA's maps.

    PYTHONPATH=$CARLA_ROOT/PythonAPI/carla python vla_rl_first_junctions.py \
        --routes bench2drive220.xml --maps $CARLA_ROOT/CarlaUE4/Content/Carla/Maps \
        --out first_junctions.json

Needs CARLA's Python API and its folder `agents`, but no running CARLA: the maps are read from their
.xodr files. Each route is interpolated by CARLA's planner at 1 m, as tools/ability_benchmark.py does
at Bench2Drive 7ec25d1. The file holds, by the route's id, the number of the first point that lies in
a junction, counted from 1 (null without any), and the number of points:

    {"format": 1, "routes": {"1711": {"point": 131, "num_points": 412}, ...}}
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import carla
from agents.navigation.global_route_planner import GlobalRoutePlanner

FORMAT = 1
RESOLUTION_M = 1.0


def first_junction(planner: Any, locations: list[Any]) -> dict[str, int | None]:
    """Return the first junction of a route through locations of the map."""
    points = [
        point
        for start, end in zip(locations, locations[1:])  # noqa: B905, RUF007  # Python 3.8
        for point, _ in planner.trace_route(start, end)
    ]
    inside = (number for number, point in enumerate(points, 1) if point.is_junction)
    return {"point": next(inside, None), "num_points": len(points)}


def make_planner(town: str, maps: Path) -> Any:
    """Return CARLA's planner on a town's map. Raises: SystemExit if there is no such map."""
    files = (maps / "OpenDrive" / (town + ".xodr"), maps / town / "OpenDrive" / (town + ".xodr"))
    for file in files:
        if file.exists():
            return GlobalRoutePlanner(
                carla.Map(town, file.read_text(encoding="utf-8")), RESOLUTION_M
            )
    raise SystemExit(
        "the map of {} is neither {} nor {}; give CARLA's folder of maps as --maps, and install "
        "CARLA's additional maps".format(town, *files)
    )


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description="Write the first junction of each route.")
    parser.add_argument("--routes", required=True, help="Bench2Drive's file of a route set, .xml")
    parser.add_argument("--maps", required=True, help="CARLA's folder of maps")
    parser.add_argument("--out", required=True, help="file to write, .json")
    given = parser.parse_args()
    routes = ElementTree.parse(given.routes).getroot().findall("route")
    # a planner of a large town takes minutes and gigabytes, so one is kept at a time
    routes.sort(key=lambda route: route.attrib["town"])
    found: dict[str, Any] = {}
    town, planner = None, None
    for number, route in enumerate(routes, 1):
        name = "route {} ({} of {})".format(route.attrib["id"], number, len(routes))
        print(name, "on", route.attrib["town"], file=sys.stderr, flush=True)
        if route.attrib["town"] != town:
            planner = None
            town = route.attrib["town"]
            planner = make_planner(town, Path(given.maps))
        locations = [
            carla.Location(*(float(position.attrib[axis]) for axis in "xyz"))
            for position in route.findall("waypoints/position")
        ]
        found[route.attrib["id"]] = first_junction(planner, locations)
    Path(given.out).write_text(
        json.dumps({"format": FORMAT, "routes": found}, indent=1), encoding="utf-8"
    )


if __name__ == "__main__":
    main()
