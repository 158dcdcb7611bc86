"""Bench2Drive's files: route sets (.xml) and the leaderboard's results (.json).

ids = route_ids(routes_xml)
require_route_set(ids, "bench2drive220")
table = table_of(read_records(results), "bench2drive220", ids)
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final
from xml.etree import ElementTree

from vla_rl.driving_scores.bench2drive import UNPENALISED, RouteRecord, RouteSet

DIGESTS: Final[dict[str, str]] = {
    "f4fdc49680fb0df926f5da59d87d0784883ce9f3153acfb232579f46e8f3ff68": "bench2drive220",
    "e1ccd0e234dc164d77fdf38783b7a4b087dcf5c07306f3fee7085fe5c289509f": "bench2drive_0.0.4_val",
}
"""SHA-256 of a set's sorted route ids, joined by commas, at Bench2Drive 7ec25d1."""

_PERCENT: Final = re.compile(r"(-?[\d.]+)%")
_ROUTE: Final = re.compile(r"RouteScenario_(\d+)")


def route_ids(path: Path) -> list[str]:
    """Return the ids of a routes file. Raises: ValueError naming the file."""
    try:
        found = [route.attrib["id"] for route in ElementTree.parse(path).getroot().iter("route")]
    except (OSError, ElementTree.ParseError, KeyError) as error:
        raise ValueError(f"{path} is no file of routes: {error!r}.") from error
    if not found:
        raise ValueError(f"{path} has no routes, expected Bench2Drive's file of a route set.")
    return found


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
        try:
            found = json.loads(path.read_text())["_checkpoint"]["records"]
            records += [record_of(record) for record in found]
        except (OSError, TypeError, KeyError, ValueError) as error:
            raise ValueError(f"{path} holds no results of the leaderboard: {error!r}.") from error
    return records


def record_of(record: Mapping[str, Any]) -> RouteRecord:
    """Return one record of the leaderboard. Raises: ValueError; KeyError."""
    route = _ROUTE.match(record["route_id"])
    if route is None:
        raise ValueError(f"route_id is {record['route_id']!r}, expected RouteScenario_<id>_rep<n>.")
    events: Mapping[str, Sequence[str]] = record["infractions"]
    outside = [_percent(message) for message in events.get("outside_route_lanes", ())]
    return RouteRecord(
        route_id=route[1],
        status=record["status"],
        completion=float(record["scores"]["score_route"]),
        infractions={kind: len(of_kind) for kind, of_kind in events.items() if kind != UNPENALISED},
        outside_route=outside[0] if outside else 0.0,
        speeds=[_percent(message) for message in events.get(UNPENALISED, ())],
    )


def _percent(message: str) -> float:
    found = _PERCENT.search(message)
    if found is None:
        raise ValueError(f"an event says {message!r}, expected a percentage in it.")
    return float(found[1])
