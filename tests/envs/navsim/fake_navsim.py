"""A stand-in for the few names of navsim that `export_scenes.py` uses, over scenes of ours.

    python fake_navsim.py ROOT exporter arguments...

ROOT holds `cache/<token>.npz`, our scenes, and `frames.json`, what the logs say of them. Names and
attributes are those of navsim 0a380a9 and nuplan-devkit e924167.
"""

import dataclasses
import json
import runpy
import sys
import types
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from vla_rl.envs.driving.scores import Scene
from vla_rl.envs.driving.scores.geometry import box_corners
from vla_rl.envs.driving.scores.scene_files import load_scene

ROOT = Path(sys.argv[1])
FRAMES = json.loads((ROOT / "frames.json").read_text())
START_US = 1_000_000_000


class SemanticMapLayer(Enum):
    ROADBLOCK, INTERSECTION, DRIVABLE_AREA, CARPARK_AREA, LANE, LANE_CONNECTOR = range(6)


class TrackedObjectType(Enum):
    VEHICLE, TRAFFIC_CONE = range(2)


LAYERS = {
    "roadblock": SemanticMapLayer.ROADBLOCK,
    "intersection": SemanticMapLayer.INTERSECTION,
    "drivable": SemanticMapLayer.DRIVABLE_AREA,
    "car_park": SemanticMapLayer.CARPARK_AREA,
    "lane": SemanticMapLayer.LANE,
    "connector": SemanticMapLayer.LANE_CONNECTOR,
}


@dataclasses.dataclass
class TrajectorySampling:
    num_poses: int
    interval_length: float


@dataclasses.dataclass
class TimePoint:
    time_us: int


@dataclasses.dataclass
class SceneFilter:
    num_history_frames: int = 4
    num_future_frames: int = 10
    has_route: bool = True
    include_synthetic_scenes: bool = False


@dataclasses.dataclass
class SensorConfig:
    cam_f0: Any
    cam_l0: Any

    @classmethod
    def build_no_sensors(cls) -> "SensorConfig":
        return cls(False, False)


class Polygon:
    def __init__(self, ring: np.ndarray, is_valid: bool = True) -> None:
        self.exterior = SimpleNamespace(coords=[*map(tuple, ring), tuple(ring[0])])
        self.interiors: list[Any] = []
        self.is_valid = is_valid


class OccupancyMap:
    def __init__(self, polygons: dict[str, Polygon]) -> None:
        self.tokens, self._polygons = list(polygons), polygons

    def __getitem__(self, token: str) -> Polygon:
        return self._polygons[token]


class Observation:
    red_light_token = "red_light"

    def __init__(self, scene: Scene) -> None:
        tracks, lights = scene.tracks, scene.red_lights
        self.unique_objects = {
            f"track{n}": SimpleNamespace(
                track_token=f"track{n}",
                tracked_object_type=TrackedObjectType.VEHICLE
                if tracks.is_agent[n]
                else TrackedObjectType.TRAFFIC_CONE,
                box=SimpleNamespace(length=tracks.sizes[n, 0], width=tracks.sizes[n, 1]),
                velocity=SimpleNamespace(magnitude=lambda n=n: tracks.speeds[n]),
            )
            for n in range(len(tracks.sizes))
        }
        self._maps = []
        for step in range(41):
            polygons = {}
            for n in np.flatnonzero(tracks.seen_or_all[:, step]):
                (corners,) = box_corners(
                    tracks.poses[n, step, :2][None],
                    tracks.poses[n, step, 2][None],
                    tracks.sizes[n, 0] / 2,
                    tracks.sizes[n, 1] / 2,
                )
                polygons[f"track{n}"] = Polygon(corners)
            for n in np.flatnonzero(lights.is_red[:, step]):
                polygons[f"red_light_{n}"] = Polygon(lights.rings[n])
            self._maps.append(OccupancyMap(polygons))

    def __getitem__(self, step: int) -> OccupancyMap:
        assert 0 <= step < len(self._maps), f"PDMObservation: index {step} out of range!"
        return self._maps[step]


class Past:
    def __init__(self, states: np.ndarray) -> None:
        self._states = states
        self.start_time, self.end_time = TimePoint(START_US - 1_500_000), TimePoint(START_US)

    def get_state_at_times(self, times: list[TimePoint]) -> list[SimpleNamespace]:
        steps = [(time.time_us - self.start_time.time_us) // 100_000 for time in times]
        return [SimpleNamespace(state=self._states[step]) for step in steps]


class MetricCacheLoader:
    def __init__(self, cache_path: Path) -> None:
        self._folder = cache_path
        self.tokens = [file.stem for file in cache_path.glob("*.npz")]

    def get_from_token(self, token: str) -> SimpleNamespace:
        scene, frame = load_scene(self._folder / f"{token}.npz"), FRAMES[token]
        crossing = frame.get("crossing_polygon", False)
        route = scene.centre_line[:1] if frame.get("no_route") else scene.centre_line
        area = SimpleNamespace(
            tokens=[f"polygon{n}" for n in range(len(scene.map.rings))],
            map_types=[LAYERS[layer] for layer in scene.map.layers],
            _geometries=[Polygon(ring, not crossing) for ring in scene.map.rings],
        )
        ours = enumerate(scene.map.on_route)
        return SimpleNamespace(
            ego_state=SimpleNamespace(
                state=scene.start,
                time_point=TimePoint(frame["time_us"]),
                car_footprint=SimpleNamespace(
                    vehicle_parameters=SimpleNamespace(**scene.vehicle._asdict())
                ),
            ),
            trajectory=SimpleNamespace(poses=scene.reference),
            centerline=SimpleNamespace(
                discrete_path=[SimpleNamespace(x=x, y=y) for x, y in route[:, :2]]
            ),
            route_lane_ids=[f"polygon{n}" for n, on_route in ours if on_route],
            drivable_area_map=area,
            observation=Observation(scene),
            past_human_trajectory=Past(scene.history),
        )


class SceneLoader:
    def __init__(
        self,
        data_path: Path,
        original_sensor_path: Path,
        scene_filter: SceneFilter,
        synthetic_sensor_path: Path | None = None,
        synthetic_scenes_path: Path | None = None,
        sensor_config: SensorConfig | None = None,
    ) -> None:
        assert sensor_config is not None
        assert sensor_config.cam_f0 == [3]
        self.tokens = list(FRAMES)
        self.synthetic_scenes = {t: t for t, frame in FRAMES.items() if frame["synthetic"]}

    def get_scene_from_token(self, token: str) -> SimpleNamespace:
        frame = FRAMES[token]
        human = load_scene(ROOT / "cache" / f"{token}.npz").human
        now = SimpleNamespace(
            ego_status=SimpleNamespace(driving_command=np.array(frame["command"])),
            cameras=SimpleNamespace(cam_f0=SimpleNamespace(camera_path=Path(f"{token}.png"))),
        )
        return SimpleNamespace(
            scene_metadata=SimpleNamespace(num_history_frames=4, log_name=frame["log_name"]),
            frames=[None, None, None, now],
            get_future_trajectory=lambda num_trajectory_frames: SimpleNamespace(poses=human),
        )


class LogReplayTrafficAgents:
    def __init__(self, future_trajectory_sampling: TrajectorySampling) -> None:
        assert future_trajectory_sampling == TrajectorySampling(40, 0.1)

    def simulate_environment(self, simulated_ego_states: Any, metric_cache: Any) -> list[Any]:
        kept = list(metric_cache.observation.unique_objects.values())
        return [SimpleNamespace(tracked_objects=kept)]


def install(name: str, **members: Any) -> None:
    """Make a module importable, with the packages around it."""
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        package = ".".join(parts[:count])
        if package not in sys.modules:
            sys.modules[package] = types.ModuleType(package)
            sys.modules[package].__path__ = []  # type: ignore[attr-defined]
    vars(sys.modules[name]).update(members)


PDM = "navsim.planning.simulation.planner.pdm_planner"
install("navsim", __file__=str(ROOT / "navsim" / "__init__.py"))
install("navsim.common.dataclasses", SceneFilter=SceneFilter, SensorConfig=SensorConfig)
install("navsim.common.dataloader", MetricCacheLoader=MetricCacheLoader, SceneLoader=SceneLoader)
install(
    "navsim.evaluate.pdm_score",
    get_trajectory_as_array=lambda path, sampling, time: np.pad(path.poses, ((0, 0), (0, 8))),
)
install(
    f"{PDM}.utils.pdm_array_representation",
    ego_states_to_state_array=lambda states: np.array([each.state for each in states]),
)
install(
    "navsim.traffic_agents_policies.log_replay_traffic_agents",
    LogReplayTrafficAgents=LogReplayTrafficAgents,
)
install("nuplan.common.actor_state.state_representation", TimePoint=TimePoint)
install("nuplan.common.actor_state.tracked_objects_types", AGENT_TYPES={TrackedObjectType.VEHICLE})
install(
    "nuplan.planning.simulation.trajectory.trajectory_sampling",
    TrajectorySampling=TrajectorySampling,
)

if __name__ == "__main__":
    exporter, *arguments = sys.argv[2:]
    sys.argv = [exporter, *arguments]
    runpy.run_path(exporter, run_name="__main__")
