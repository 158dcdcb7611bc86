"""A stand-in for the names of CARLA that `vla_rl_first_junctions.py` uses: a street along x.

    python fake_planner.py .../vla_rl_first_junctions.py --routes ... --maps ... --out ...

The map's file holds two numbers: where the street's only junction begins and ends, in metres.
"""

import runpy
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace


@dataclass
class Location:
    x: float
    y: float
    z: float


@dataclass
class Map:
    name: str
    text: str


class GlobalRoutePlanner:
    def __init__(self, street: Map, resolution_m: float) -> None:
        self._begin, self._end = map(float, street.text.split())
        self._step = resolution_m

    def trace_route(self, start: Location, end: Location) -> Iterator[tuple[SimpleNamespace, None]]:
        at = start.x
        while at < end.x:
            yield SimpleNamespace(is_junction=self._begin <= at < self._end), None
            at += self._step


carla = types.ModuleType("carla")
vars(carla).update(Location=Location, Map=Map)
planner = types.ModuleType("agents.navigation.global_route_planner")
vars(planner).update(GlobalRoutePlanner=GlobalRoutePlanner)
sys.modules.update({"carla": carla, planner.__name__: planner})
for package in ("agents", "agents.navigation"):
    sys.modules[package] = types.ModuleType(package)

if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
