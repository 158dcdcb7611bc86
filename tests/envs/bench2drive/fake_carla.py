"""A stand-in for CARLA: its leaderboard, or the names of it that plan routes.

    python fake_carla.py leaderboard --routes-subset 7 --agent .../vla_rl_agent.py --agent-config
        config.json --checkpoint results.json [--ticks 200] [--size 8]
    python fake_carla.py planner .../vla_rl_first_junctions.py --routes ... --maps ... --out ...

One agent drives one route of a toy world at 20 Hz. It is loaded and called in the order of
leaderboard_evaluator.py at Bench2Drive 7ec25d1: the plan, `setup` with the path and the route's name
behind a plus, `sensors`, a step per tick, `destroy`.

The planner has a street along x. The map's file holds two numbers: where the street's only junction
begins and ends, in metres.
"""

import argparse
import importlib
import json
import math
import runpy
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from vla_rl.envs.driving.scores.motion import Car, Control, drive_car

EARTH, LAT, LON = 6378137.0, 49.0, 8.0
HEADING = math.radians(30.0)
"""Of the route, counter-clockwise from east."""

GOAL = 25.0


class RoadOption(Enum):
    RIGHT, LANEFOLLOW = 2, 4


class AutonomousAgent:
    def __init__(self, carla_host: str, carla_port: int, debug: bool = False) -> None:
        self._global_plan: Any = None
        self.hero_actor: Any = None

    def get_metric_info(self) -> dict[str, list[float]]:
        """The car's motion in CARLA's frame: y to the right, degrees per second."""
        car: Car = self.hero_actor
        ahead = [math.cos(car.heading), -math.sin(car.heading), 0.0]
        right = [math.sin(car.heading), math.cos(car.heading), 0.0]
        return {
            "acceleration": [car.accel * part for part in ahead],
            "angular_velocity": [0.0, 0.0, -math.degrees(car.yaw_rate)],
            "forward_vector": ahead,
            "right_vector": right,
        }

    def set_global_plan(self, plan_gps: Any, plan_world: Any) -> None:
        self._global_plan = plan_gps


def install(name: str, **members: Any) -> None:
    module = types.ModuleType(name)
    vars(module).update(members)
    sys.modules[name] = module
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, module)


def plan() -> list[tuple[dict[str, float], RoadOption]]:
    """A straight route of 60 m, a point every 20 m, whose last one is a right turn."""
    options = [RoadOption.LANEFOLLOW] * 3 + [RoadOption.RIGHT]
    return [
        (gps(20.0 * n * math.cos(HEADING), 20.0 * n * math.sin(HEADING)), option)
        for n, option in enumerate(options)
    ]


def gps(east: float, north: float) -> dict[str, float]:
    lon = LON + math.degrees(east / (EARTH * math.cos(math.radians(LAT))))
    return {"lat": LAT + math.degrees(north / EARTH), "lon": lon, "z": 0.0}


def measured(car: Car, size: int, cameras: list[str]) -> dict[str, tuple[int, Any]]:
    """What CARLA's sensors would give: left-handed, compass clockwise from north."""
    position = gps(car.x, car.y)
    compass = math.pi / 2 - car.heading
    sideways = -car.speed * car.yaw_rate
    image = np.full((size, size, 4), (10, 20, 30, 255), np.uint8)  # BGRA
    return {
        "gps": (0, np.array([position["lat"], position["lon"], 0.0])),
        "imu": (0, np.array([car.accel, sideways, 9.8, 0.0, 0.0, -car.yaw_rate, compass])),
        "speed": (0, {"speed": car.speed}),
        **dict.fromkeys(cameras, (0, image)),
    }


def drive_a_route() -> None:
    parser = argparse.ArgumentParser()
    for name in ("--routes-subset", "--agent", "--agent-config", "--checkpoint"):
        parser.add_argument(name, required=True)
    parser.add_argument("--ticks", type=int, default=200)
    parser.add_argument("--size", type=int, default=0)
    given = parser.parse_args()
    install("carla", VehicleControl=SimpleNamespace)
    install("leaderboard")
    install("leaderboard.autoagents")
    track = SimpleNamespace(SENSORS="SENSORS")
    install("leaderboard.autoagents.autonomous_agent", AutonomousAgent=AutonomousAgent, Track=track)
    sys.path.insert(0, str(Path(given.agent).parent))
    module = importlib.import_module(Path(given.agent).stem)
    agent = getattr(module, module.get_entry_point())("localhost", 2000, False)
    agent.set_global_plan(plan(), None)
    name = f"RouteScenario_{given.routes_subset}_rep0"
    save_name = f"{name}_Town12_Accident_1_01_01"
    agent.setup(f"{given.agent_config}+{save_name}")
    cameras = [each for each in agent.sensors() if each["type"] == "sensor.camera.rgb"]
    assert {each["id"] for each in agent.sensors()} >= {"gps", "imu", "speed", "front"}
    car, tick = Car(0.0, 0.0, HEADING, 5.0, 0.0, 0.0, 0.0), 0
    while tick < given.ticks and math.hypot(car.x, car.y) < GOAL:
        agent.hero_actor = car
        size = given.size or cameras[0]["width"]
        control = agent.run_step(measured(car, size, [c["id"] for c in cameras]), tick / 20)
        car = drive_car(car, Control(control.throttle, -control.steer, control.brake))
        tick += 1
    agent.destroy()
    done = min(100.0 * math.hypot(car.x, car.y) / GOAL, 100.0)
    record = {
        "route_id": name,
        "save_name": save_name,
        "status": "Perfect" if done == 100.0 else "Failed - Agent timed out",
        "infractions": {"red_light": [], "min_speed_infractions": ["Average speed is 80% of it"]},
        "scores": {"score_route": done, "score_penalty": 1.0, "score_composed": done},
    }
    Path(given.checkpoint).write_text(json.dumps({"_checkpoint": {"records": [record]}}))


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


def plan_routes(script: str) -> None:
    """Run a script that asks for the planner."""
    install("carla", Location=Location, Map=Map)
    install("agents")
    install("agents.navigation")
    install("agents.navigation.global_route_planner", GlobalRoutePlanner=GlobalRoutePlanner)
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    _, what, *sys.argv[1:] = sys.argv
    if what == "leaderboard":
        drive_a_route()
    else:
        del sys.argv[0]
        plan_routes(sys.argv[0])
