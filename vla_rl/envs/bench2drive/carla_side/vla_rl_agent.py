"""An agent for CARLA's leaderboard that asks a policy on another machine.

    --agent=.../vla_rl_agent.py --agent-config=.../vla_rl_agent.json

The configuration names the policy's address, the cameras and their size in pixels:

    {"host": "10.0.0.2", "port": 5600, "cameras": ["front"], "size": 224, "timeout_s": 60}

With "rides": "FOLDER", the log that Bench2Drive's smoothness is computed from is written to
FOLDER/<the drive's name>/metric_info.json. It has the simulator's own motion of the car, which the
policy never gets.

Needs no package beside the leaderboard's own. Written against Bench2Drive 7ec25d1.
"""

from __future__ import annotations

import json
import math
import os
from typing import Any

import carla
from leaderboard.autoagents import autonomous_agent
from vla_rl_wire import VERSION, Wire, connect, require_version

CAMERAS = {
    "front": (0.8, 0.0, 0.0),
    "front_left": (0.27, -0.55, -55.0),
    "front_right": (0.27, 0.55, 55.0),
    "back": (-2.0, 0.0, 180.0),
    "back_left": (-0.32, -0.55, -110.0),
    "back_right": (-0.32, 0.55, 110.0),
}
"""Metres ahead and to the right of the car's centre, and degrees to the right."""

HEIGHT = 1.6
FIELD_OF_VIEW = 70
BACK_FIELD_OF_VIEW = 110


def get_entry_point() -> str:
    """Return the name of the agent's class, as the leaderboard asks for it."""
    return "VlaRlAgent"


class VlaRlAgent(autonomous_agent.AutonomousAgent):  # type: ignore[misc]
    """Sends what the sensors measure, and drives as the answer says.

    A policy that is silent or gone raises an error, which the leaderboard records for the route.
    """

    _wire: Wire | None = None
    _rides: str | None = None

    def setup(self, path_to_conf_file: str) -> None:
        """Connect to the policy and name the route."""
        self.track = autonomous_agent.Track.SENSORS
        # the leaderboard appends "+" and the route's name to the path, once more for every route
        path, _, names = path_to_conf_file.partition("+")
        with open(path, encoding="utf-8") as file:
            config = json.load(file)
        self._cameras, self._size = list(config["cameras"]), int(config["size"])
        unknown = sorted(set(self._cameras) - set(CAMERAS))
        if unknown:
            raise ValueError(f"cameras {unknown} are unknown, expected {sorted(CAMERAS)}")
        self._look = True
        self._name = names.split("+")[-1]
        self._rides = config.get("rides")
        self._ride: dict[int, Any] = {}
        peer = f"the policy at {config['host']}:{config['port']}"
        timeout_s = float(config.get("timeout_s", 60))
        self._wire = connect(config["host"], int(config["port"]), peer, timeout_s)
        plan = [[gps["lat"], gps["lon"], int(option.value)] for gps, option in self._global_plan]
        self._wire.send(
            {
                "kind": "hello",
                "version": VERSION,
                "route": self._name,
                "cameras": {name: [self._size, self._size] for name in self._cameras},
                "plan": plan,
            }
        )
        welcome, _ = self._wire.expect("welcome")
        require_version(welcome, peer)

    def sensors(self) -> list[dict[str, Any]]:
        """Return the sensors, as the leaderboard asks for them."""
        cameras = []
        for name in self._cameras:
            x, y, yaw = CAMERAS[name]
            fov = BACK_FIELD_OF_VIEW if name == "back" else FIELD_OF_VIEW
            mount = {"x": x, "y": y, "z": HEIGHT, "roll": 0.0, "pitch": 0.0, "yaw": yaw}
            kind = {"type": "sensor.camera.rgb", "id": name, "fov": fov}
            cameras.append({"width": self._size, "height": self._size, **kind, **mount})
        no_offset = {"x": 0.0, "y": 0.0, "z": 0.0, "roll": 0.0, "pitch": 0.0, "yaw": 0.0}
        return [
            *cameras,
            {"type": "sensor.other.gnss", "id": "gps", **no_offset},
            {"type": "sensor.other.imu", "id": "imu", "sensor_tick": 0.05, **no_offset},
            {"type": "sensor.speedometer", "id": "speed", "reading_frequency": 20},
        ]

    def run_step(self, input_data: dict[str, Any], timestamp: float) -> Any:
        """Send one tick and return the control."""
        assert self._wire is not None
        # the policy decides every tenth tick; images of the others would be sent for nothing
        names = self._cameras if self._look else []
        images = [input_data[name][1] for name in names]
        # sent as CARLA measures them: the policy's side alone converts frames and degrees
        imu = [float(number) for number in input_data["imu"][1]]
        tick = {
            "kind": "tick",
            "time_s": timestamp,
            "speed": float(input_data["speed"][1]["speed"]),
            "gps": [float(number) for number in input_data["gps"][1][:2]],
            # the compass has no value in some first ticks
            "imu": [number if math.isfinite(number) else None for number in imu],
            "pictures": {
                name: [image.shape[1], image.shape[0]]
                for name, image in zip(names, images)  # noqa: B905  # Python 3.8
            },
        }
        self._wire.send(tick, b"".join(image.tobytes() for image in images))
        answer, _ = self._wire.expect("control")
        self._look = answer["look"]
        control = carla.VehicleControl()
        control.throttle = answer["throttle"]
        control.steer = answer["steer"]
        control.brake = answer["brake"]
        if self._rides is not None:
            self._ride[len(self._ride)] = self.get_metric_info()
        return control

    def destroy(self) -> None:
        """Write the ride, say goodbye and close the connection."""
        if self._wire is not None and self._rides is not None:
            folder = os.path.join(self._rides, self._name)
            os.makedirs(folder, exist_ok=True)
            with open(os.path.join(folder, "metric_info.json"), "w", encoding="utf-8") as file:
                json.dump(self._ride, file)
        if self._wire is not None:
            try:
                self._wire.send({"kind": "end"})
            finally:
                self._wire.close()
                self._wire = None
