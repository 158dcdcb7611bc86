"""Scenes and planned trajectories as .npz files of plain arrays, without pickle, written by any program.

    save_scene(path, scene)       anything that has numpy can write the same arrays
    scene = load_scene(path)

Arrays of a scene: start [11]; centre_line [K, 2]; corners [C, 2] and ring_sizes [P], the polygons one
after another; layers [P], names; on_route [P]; track_poses [N, 51, 3], track_sizes [N, 2], track_speeds
[N], track_is_agent [N], track_seen [N, 51]; red_corners, red_ring_sizes, is_red [R, 41]; vehicle
[4]; and, where known, reference [41, 3], history [H, 11] and human [8, 3].

    np.savez(path, tokens=tokens, waypoints=waypoints, interval_s=0.5)

Arrays of plans: tokens [N], names of the scenes; waypoints [N, 8, 3], x, y and heading of the rear axle
in the car's frame, metres and radians, 0.5 to 4.0 s ahead; interval_s, seconds between two waypoints.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Final, cast

import numpy as np

from vla_rl.envs.driving.scores.geometry import Floats
from vla_rl.envs.driving.scores.pdm import check_finite_waypoints, measure_backward
from vla_rl.envs.driving.scores.scene import Layer, Map, RedLights, Scene, Tracks, Vehicle
from vla_rl.util.arrays import read_npz
from vla_rl.util.foreign_data import reading_file

FORMAT: Final = 1
"""Version of the layout, stored as `format`."""

OPTIONAL: Final = ("reference", "history", "human")
REQUIRED: Final = (
    "start",
    "centre_line",
    "corners",
    "ring_sizes",
    "layers",
    "on_route",
    "track_poses",
    "track_sizes",
    "track_speeds",
    "track_is_agent",
    "track_seen",
    "red_corners",
    "red_ring_sizes",
    "is_red",
    "vehicle",
)


def save_scene(path: Path, scene: Scene) -> None:
    """Write a scene."""
    tracks, lights = scene.tracks, scene.red_lights
    arrays: dict[str, np.ndarray] = {
        "format": np.array(FORMAT),
        "start": scene.start,
        "centre_line": scene.line,
        "corners": _join_rings(scene.map.rings),
        "ring_sizes": np.array([len(ring) for ring in scene.map.rings], np.int64),
        "layers": np.array(scene.map.layers, np.str_),
        "on_route": np.array(scene.map.on_route, bool),
        "track_poses": tracks.poses,
        "track_sizes": tracks.sizes,
        "track_speeds": tracks.speeds,
        "track_is_agent": tracks.is_agent,
        "track_seen": tracks.seen_or_all,
        "red_corners": _join_rings(lights.rings),
        "red_ring_sizes": np.array([len(ring) for ring in lights.rings], np.int64),
        "is_red": lights.is_red,
        "vehicle": np.array(scene.vehicle, np.float64),
    }
    known = {name: cast("Floats | None", getattr(scene, name)) for name in OPTIONAL}
    arrays |= {name: value for name, value in known.items() if value is not None}
    # given a path, numpy appends .npz to a name that lacks it; without pickle, a scene of somebody
    # else runs none of their code when it is read
    with path.open("wb") as file:
        np.savez_compressed(file, allow_pickle=False, **arrays)


def load_scene(path: Path) -> Scene:
    """Read a scene.

    Raises: ValueError naming the file, if it is no scene or its parts do not fit.
    """
    return parse_scene(read_arrays(path), path)


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """Read all arrays of a scene file, those of other writers too.

    Raises: ValueError naming the file, if it is no scene file or lacks an array.
    """
    with reading_file(path, " is no scene file", "export it again"):
        arrays = read_npz(path)
        version = int(arrays.get("format", np.array(-1)))
    if version != FORMAT:
        raise ValueError(f"{path} has format {version}, expected {FORMAT}; export it again.")
    missing = [name for name in REQUIRED if name not in arrays]
    if missing:
        raise ValueError(f"{path} lacks {', '.join(missing)}; export it again.")
    return arrays


def parse_scene(arrays: Mapping[str, np.ndarray], path: Path) -> Scene:
    """Return the scene that the arrays of `path` hold. Raises: ValueError naming the file."""
    with reading_file(path, "", "export it again"):
        return _build_scene(arrays)


def get_texts(array: np.ndarray, name: str) -> list[str]:
    """Return the texts of an array; of one without axes, its only one.

    Raises: ValueError for an array of anything else, whose `str()` is Python's spelling of it.
    """
    if array.dtype.kind != "U":
        raise ValueError(f"{name} holds {array.dtype}, expected text (NumPy's type U)")
    return [str(each) for each in array.ravel()]


def _build_scene(arrays: Mapping[str, np.ndarray]) -> Scene:
    layers = tuple(cast("Layer", name) for name in get_texts(arrays["layers"], "layers"))
    return Scene(
        start=arrays["start"],
        map=Map(
            _split_rings(arrays["corners"], arrays["ring_sizes"]),
            layers,
            tuple(bool(flag) for flag in arrays["on_route"]),
        ),
        centre_line=arrays["centre_line"],
        tracks=Tracks(
            arrays["track_poses"],
            arrays["track_sizes"],
            arrays["track_speeds"],
            arrays["track_is_agent"],
            arrays["track_seen"],
        ),
        red_lights=RedLights(
            _split_rings(arrays["red_corners"], arrays["red_ring_sizes"]), arrays["is_red"]
        ),
        reference=arrays.get("reference"),
        history=arrays.get("history"),
        human=arrays.get("human"),
        vehicle=Vehicle(*(float(part) for part in arrays["vehicle"])),
    )


def _join_rings(rings: tuple[Floats, ...]) -> Floats:
    return np.concatenate([np.zeros((0, 2)), *rings])


def _split_rings(corners: Floats, sizes: np.ndarray) -> tuple[Floats, ...]:
    if sizes.sum() != len(corners):
        raise ValueError(f"the rings have {sizes.sum()} corners, expected {len(corners)}.")
    return tuple(np.split(corners, np.cumsum(sizes)[:-1])) if len(sizes) else ()


INTERVAL_S: Final = 0.5
"""Time between two waypoints."""

MAX_BACKWARD_M: Final = 1.0
"""Metres that a waypoint may lie behind the one before it; more is a jump, not a reverse gear."""


def read_plans(path: Path) -> dict[str, Floats]:
    """Return the waypoints [8, 3] of each scene. Raises: ValueError naming the file."""
    remedy = "expected arrays tokens, waypoints, interval_s"
    with reading_file(path, " is no file of plans", remedy):
        arrays = read_npz(path)
        tokens, waypoints = get_texts(arrays["tokens"], "tokens"), arrays["waypoints"]
        interval_s = float(arrays["interval_s"])
        num_plans = len(waypoints)
    if len(set(tokens)) != len(tokens) or len(tokens) != num_plans:
        raise ValueError(
            f"{path} has {len(tokens)} tokens, {len(set(tokens))} of them different, and "
            f"{num_plans} plans, expected one plan for each token."
        )
    with reading_file(path, "", "repair or drop them"):
        return dict(zip(tokens, check_waypoints(waypoints, interval_s), strict=True))


def check_waypoints(waypoints: Floats, interval_s: float = INTERVAL_S) -> Floats:
    """Return the waypoints [B, 8, 3].

    Raises: ValueError for another rate or shape, numbers that are not finite, and jumps backwards.
    """
    if abs(interval_s - INTERVAL_S) > 1e-6:
        raise ValueError(
            f"waypoints are {interval_s} s apart, expected {INTERVAL_S} s; resample them."
        )
    given = check_finite_waypoints(waypoints)
    # plans of policies that learnt from the score were seen to jump back; no planner does
    back = measure_backward(given)
    jumping = np.flatnonzero(back.max(-1) > MAX_BACKWARD_M)
    if len(jumping):
        first = int(jumping[0])
        raise ValueError(
            f"waypoint {int(back[first].argmax()) + 1} of trajectory {first} lies "
            f"{back[first].max():.1f} m behind the one before it, expected at most "
            f"{MAX_BACKWARD_M} m; such jumps exploit the score, so drop or repair that plan "
            f"({len(jumping)} in all)."
        )
    return given
