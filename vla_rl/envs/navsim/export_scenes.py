"""Export scenes of a navsim install to plain .npz files, with that install's Python.

    python export_scenes.py --split navtest --cache $NAVSIM_EXP_ROOT/metric_cache \
        --logs $OPENSCENE_DATA_ROOT/navsim_logs/test --sensors $OPENSCENE_DATA_ROOT/sensor_blobs/test \
        --out navtest_scenes

`vla-rl export navsim DIR` writes this file for the machine with navsim; it imports nothing of vla_rl
and needs Python 3.9.
Make the metric cache with navsim's run_metric_caching.py first. Written against navsim 0a380a9
(v2.2) and its branch v1.1, whose caches lack the past, the red lights and the second stage.

Each scene becomes one file, whose images are linked, or copied, beside it. A scene that cannot
be written is left out; a line on stderr says why. The layout is that of
vla_rl/envs/driving/scores/scene_files.py and navsim.py.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import navsim
import numpy as np
import yaml
from navsim.common.dataclasses import SceneFilter, SensorConfig
from navsim.common.dataloader import MetricCacheLoader, SceneLoader
from navsim.evaluate.pdm_score import get_trajectory_as_array
from navsim.planning.simulation.planner.pdm_planner.utils.pdm_array_representation import (
    ego_states_to_state_array,
)
from nuplan.common.actor_state.state_representation import TimePoint
from nuplan.common.actor_state.tracked_objects_types import AGENT_TYPES
from nuplan.planning.simulation.trajectory.trajectory_sampling import TrajectorySampling

FORMAT = 1
NUM_STATES = 41
NUM_TRACK_STEPS = 51
SAMPLING = TrajectorySampling(num_poses=NUM_STATES - 1, interval_length=0.1)
LAYERS = {
    "ROADBLOCK": "roadblock",
    "INTERSECTION": "intersection",
    "DRIVABLE_AREA": "drivable",
    "CARPARK_AREA": "car_park",
    "LANE": "lane",
    "LANE_CONNECTOR": "connector",
}
CAMERAS = ("cam_f0", "cam_l0", "cam_l1", "cam_l2", "cam_r0", "cam_r1", "cam_r2", "cam_b0")
SPLITS = Path(navsim.__file__).parent / "planning/script/config/common/train_test_split"


class NotExportable(ValueError):
    """A scene that the format cannot hold."""


def make_cache_arrays(cache: Any) -> dict[str, np.ndarray]:
    """Return all that trajectories are graded by."""
    ego = cache.ego_state
    line = cache.centerline.discrete_path
    if len(line) < 2:
        raise NotExportable("it has no route")
    sizes = ego.car_footprint.vehicle_parameters
    proposal = get_trajectory_as_array(cache.trajectory, SAMPLING, ego.time_point)
    arrays = {
        "format": np.array(FORMAT),
        "start": ego_states_to_state_array([ego])[0],
        "centre_line": np.array([[pose.x, pose.y] for pose in line]),
        "reference": proposal[:, :3],
        "vehicle": np.array([sizes.width, sizes.front_length, sizes.rear_length, sizes.wheel_base]),
    }
    arrays.update(map_arrays(cache))
    arrays.update(make_traffic_arrays(cache))
    # caches of branch v1.1 have no past
    past = getattr(cache, "past_human_trajectory", None)
    if past is not None:
        times = np.arange(past.start_time.time_us, past.end_time.time_us, 100000)
        states = past.get_state_at_times([TimePoint(int(time)) for time in times])
        arrays["history"] = ego_states_to_state_array(states)
    return arrays


def map_arrays(cache: Any) -> dict[str, np.ndarray]:
    """Return the polygons of the drivable map."""
    area, route = cache.drivable_area_map, set(cache.route_lane_ids)
    rings, layers, on_route = [], [], []
    for token, kind, polygon in zip(  # noqa: B905  # Python 3.9
        area.tokens, area.map_types, area._geometries
    ):
        if kind.name not in LAYERS:
            raise NotExportable(f"its map has a polygon of the unknown layer {kind.name}")
        layer = LAYERS[kind.name]
        # a lane of several parts becomes several polygons; the format has simple rings alone
        for part in getattr(polygon, "geoms", [polygon]):
            rings.append(get_ring(part, token))
            layers.append(layer)
            on_route.append(layer in ("lane", "connector") and token in route)
    return {
        "corners": np.concatenate(rings) if rings else np.zeros((0, 2)),
        "ring_sizes": np.array([len(ring) for ring in rings], np.int64),
        "layers": np.array(layers, np.str_),
        "on_route": np.array(on_route, np.bool_),
    }


def get_ring(polygon: Any, token: Any) -> np.ndarray:
    """Return a polygon's corners [k, 2]."""
    if not polygon.is_valid:
        raise NotExportable(f"polygon {token} of its map crosses itself")
    if len(polygon.interiors):
        raise NotExportable(f"polygon {token} of its map has a hole")
    return np.array(polygon.exterior.coords, np.float64)[:-1, :2]


def make_traffic_arrays(cache: Any) -> dict[str, np.ndarray]:
    """Return the tracks of the others, as navsim's non-reactive traffic moves, and the red lights."""
    observation = cache.observation
    lights: dict[str, np.ndarray] = {}
    ring_by_light: dict[str, np.ndarray] = {}
    poses: dict[str, np.ndarray] = {}
    seen: dict[str, np.ndarray] = {}
    kept = replayed_tokens(cache)
    for step, occupied in enumerate(occupancy_maps(observation)):
        for token in occupied.tokens:
            polygon = occupied[token]
            if observation.red_light_token in str(token):
                if step < NUM_STATES:
                    ring_by_light[token] = get_ring(polygon, token)
                    lights.setdefault(token, np.zeros(NUM_STATES, bool))[step] = True
            elif kept is None or token in kept:
                # boxes have the corners front left, rear left, rear right, front right
                corners = np.array(polygon.exterior.coords, np.float64)[:4, :2]
                ahead = corners[0] - corners[1]
                pose = [*corners.mean(0), np.arctan2(ahead[1], ahead[0])]
                poses.setdefault(token, np.zeros((NUM_TRACK_STEPS, 3)))[step] = pose
                seen.setdefault(token, np.zeros(NUM_TRACK_STEPS, bool))[step] = True
    objects = [observation.unique_objects[token] for token in poses]
    is_agent = [each.tracked_object_type in AGENT_TYPES for each in objects]
    # the scorer takes things that are no agents for standing ones
    speeds = [
        each.velocity.magnitude() if each.tracked_object_type in AGENT_TYPES else 0.0
        for each in objects
    ]
    count = len(objects)
    return {
        "track_poses": np.array(list(poses.values())).reshape(count, NUM_TRACK_STEPS, 3),
        "track_seen": np.array(list(seen.values()), bool).reshape(count, NUM_TRACK_STEPS),
        "track_sizes": np.array([[each.box.length, each.box.width] for each in objects]).reshape(
            count, 2
        ),
        "track_speeds": np.array(speeds, np.float64),
        "track_is_agent": np.array(is_agent, np.bool_),
        "red_corners": np.concatenate([np.zeros((0, 2)), *ring_by_light.values()]),
        "red_ring_sizes": np.array([len(ring) for ring in ring_by_light.values()], np.int64),
        "is_red": np.array(list(lights.values()), bool).reshape(len(lights), NUM_STATES),
    }


def occupancy_maps(observation: Any) -> Any:
    """Yield the observation's maps at 10 Hz: 41 of a version 2 cache, 51 of version 1."""
    for step in range(NUM_TRACK_STEPS):
        try:
            yield observation[step]
        except (AssertionError, IndexError):
            return


def replayed_tokens(cache: Any) -> Any:
    """Return the tracks that navsim's log replay keeps: those that do not overlap the car at 0 s.

    None in version 1, which keeps all.
    """
    try:
        from navsim.traffic_agents_policies.log_replay_traffic_agents import (
            LogReplayTrafficAgents,
        )
    except ImportError:
        return None
    frames = LogReplayTrafficAgents(SAMPLING).simulate_environment(None, cache)
    return {each.track_token for frame in frames for each in frame.tracked_objects}


def make_scene_arrays(scene: Any, token: str, is_synthetic: bool) -> dict[str, np.ndarray]:
    """Return the frame's name, time, command and, if it was recorded, the human's trajectory."""
    frame = scene.frames[scene.scene_metadata.num_history_frames - 1]
    command = np.asarray(frame.ego_status.driving_command, np.float64).reshape(-1)
    if command.shape != (4,):
        raise NotExportable(f"its driving command has {command.size} parts, expected 4")
    arrays = {
        "token": np.array(token),
        "log_name": np.array(scene.scene_metadata.log_name),
        "is_synthetic": np.array(int(is_synthetic)),
        "command": command,
    }
    if not is_synthetic:
        human = scene.get_future_trajectory(num_trajectory_frames=8)
        arrays["human"] = np.asarray(human.poses, np.float64)
    return arrays


def link_images(
    scene: Any, token: str, cameras: list[str], root: Path, out: Path
) -> dict[str, np.ndarray]:
    """Link each camera's file, or copy it, to out/pictures, and return the names."""
    frame = scene.frames[scene.scene_metadata.num_history_frames - 1]
    names = []
    for camera in cameras:
        source = root / str(getattr(frame.cameras, camera).camera_path)
        name = Path("pictures") / f"{token}_{camera}{source.suffix}"
        if not (out / name).exists():
            try:
                # a link takes no space: the camera files of a split are hundreds of gigabytes
                os.link(source, out / name)
            except OSError:  # another file system
                shutil.copyfile(source, out / name)
        names.append(str(name))
    return {"cameras": np.array(cameras, np.str_), "pictures": np.array(names, np.str_)}


def load_split(name: str) -> tuple[Any, Any]:
    """Return navsim's filter of a split, and the frames of its two stages or None."""
    split = yaml.safe_load((SPLITS / f"{name}.yaml").read_text(encoding="utf-8"))
    named = next(each["scene_filter"] for each in split["defaults"] if "scene_filter" in each)
    fields = yaml.safe_load((SPLITS / "scene_filter" / f"{named}.yaml").read_text(encoding="utf-8"))
    plain = {key: value for key, value in fields.items() if not key.startswith("_")}
    return SceneFilter(**plain), split.get("reactive_all_mapping")


def export(arguments: argparse.Namespace) -> int:
    """Export every scene; return the exit status."""
    out = Path(arguments.out)
    (out / "pictures").mkdir(parents=True, exist_ok=True)
    scene_filter, two_stages = load_split(arguments.split)
    if getattr(scene_filter, "include_synthetic_scenes", False) and not arguments.synthetic_scenes:
        raise SystemExit(
            f"{arguments.split} has two stages; give --synthetic-scenes and --synthetic-sensors."
        )
    last = scene_filter.num_history_frames - 1
    wanted = {camera: [last] for camera in arguments.cameras}
    sensors = SensorConfig(**{**vars(SensorConfig.build_no_sensors()), **wanted})
    second = {}
    if arguments.synthetic_scenes:
        second = {
            "synthetic_scenes_path": Path(arguments.synthetic_scenes),
            "synthetic_sensor_path": Path(arguments.synthetic_sensors),
        }
    loader = SceneLoader(
        Path(arguments.logs),
        Path(arguments.sensors),
        scene_filter,
        sensor_config=sensors,
        **second,
    )
    caches = MetricCacheLoader(Path(arguments.cache))
    synthetic = set(getattr(loader, "synthetic_scenes", {}))
    tokens = sorted(set(loader.tokens) & set(caches.tokens))[: arguments.limit]
    num_left_out = 0
    for token in tokens:
        is_synthetic = token in synthetic
        root = Path(arguments.synthetic_sensors if is_synthetic else arguments.sensors)
        try:
            cache, scene = caches.get_from_token(token), loader.get_scene_from_token(token)
            arrays = make_cache_arrays(cache)
            arrays["time_s"] = np.array(cache.ego_state.time_point.time_us / 1e6)
            arrays.update(make_scene_arrays(scene, token, is_synthetic))
            arrays.update(link_images(scene, token, arguments.cameras, root, out))
        except (NotExportable, OSError) as error:
            print(f"left out {token}: {error}", file=sys.stderr)
            num_left_out += 1
            continue
        with open(out / f"{token}.npz", "wb") as file:
            np.savez_compressed(file, **arrays)  # type: ignore[arg-type]
    if two_stages:
        (out / "two_stages.json").write_text(json.dumps(two_stages), encoding="utf-8")
    print(f"wrote {len(tokens) - num_left_out} scenes to {out}, left out {num_left_out}")
    num_uncached = len(set(loader.tokens) - set(caches.tokens))
    if num_uncached:
        print(f"{num_uncached} scenes of the split have no metric cache", file=sys.stderr)
    return 0 if len(tokens) > num_left_out else 1


def parsed() -> argparse.Namespace:
    """Return the command line's arguments."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--split", required=True, help="navsim's split, such as navtest")
    parser.add_argument("--cache", required=True, help="folder of run_metric_caching.py")
    parser.add_argument("--logs", required=True, help="folder of the split's logs")
    parser.add_argument("--sensors", required=True, help="folder of the split's camera files")
    parser.add_argument("--synthetic-scenes", default="", help="scenes of the second stage")
    parser.add_argument("--synthetic-sensors", default="", help="their camera files")
    parser.add_argument(
        "--cameras", nargs="*", default=["cam_f0"], choices=CAMERAS, help="cameras to export"
    )
    parser.add_argument("--limit", type=int, default=None, help="export the first scenes only")
    parser.add_argument("--out", required=True, help="folder to write to")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(export(parsed()))
