"""Scenes to grade trajectories in: map, traffic, route, the car with its own past.

Figures of the ego vehicle that NavSim grades: nuPlan's Pacifica, nuplan-devkit e924167
nuplan/common/actor_state/vehicle_parameters.py.
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Final, Literal, NamedTuple, cast

import numpy as np

from vla_rl.envs.driving.scores.geometry import Bools, Floats, Polygons


class Vehicle(NamedTuple):
    """Sizes of a car in metres; its pose is that of the rear axle."""

    width: float = 2.297
    front_length: float = 4.049
    rear_length: float = 1.127
    wheel_base: float = 3.089

    @property
    def half_length(self) -> float:
        """Half of the distance between the bumpers."""
        return (self.front_length + self.rear_length) / 2.0

    @property
    def half_width(self) -> float:
        """Half of the width."""
        return self.width / 2.0

    @property
    def rear_axle_to_centre(self) -> float:
        """Distance from the rear axle forward to the centre of the box."""
        return self.half_length - self.rear_length


PACIFICA: Final = Vehicle()

X, Y, HEADING, VX, VY, AX, AY, STEER, STEER_RATE, YAW_RATE, YAW_ACCEL = range(11)
"""Columns of a state: position and heading of the rear axle in the scene's frame, velocity and
acceleration in the car's frame, steering angle and rate, yaw rate and acceleration. Metres,
seconds, radians; x forward, y left, angles counter-clockwise."""

STATE_SIZE: Final = 11
INTERVAL_S: Final = 0.1
"""Time between two states of a graded motion."""

NUM_STEPS: Final = 40
"""Steps of a graded motion: 4 s, so 41 states."""


Layer = Literal["roadblock", "intersection", "drivable", "car_park", "lane", "connector"]

DRIVABLE_LAYERS: Final = ("roadblock", "intersection", "drivable", "car_park")
LANE_LAYERS: Final = ("lane", "connector")

NUM_TRACK_STEPS: Final = NUM_STEPS + 11
"""Samples of each track at 10 Hz: the 4 s that are graded and 1 s more for time to collision."""


@dataclass(frozen=True)
class Map:
    """Polygons around the car.

    Args:
        rings: corners of each polygon, [k, 2].
        layers: its layer, one for each polygon.
        on_route: if it is a lane or connector of the route, one for each polygon.

    Example:
        One lane of the route, and the road under it:

        ring = np.array([[0.0, -1.75], [80.0, -1.75], [80.0, 1.75], [0.0, 1.75]])
        Map(rings=(ring, ring), layers=("lane", "roadblock"), on_route=(True, False))
    """

    rings: tuple[Floats, ...]
    layers: tuple[Layer, ...]
    on_route: tuple[bool, ...]

    def __post_init__(self) -> None:
        if not len(self.rings) == len(self.layers) == len(self.on_route):
            raise ValueError(
                f"the map has {len(self.rings)} polygons, {len(self.layers)} layers and "
                f"{len(self.on_route)} route flags, expected one of each for every polygon."
            )
        unknown = set(self.layers) - set(DRIVABLE_LAYERS) - set(LANE_LAYERS)
        if unknown:
            raise ValueError(
                f"map layers {sorted(unknown)} are unknown, expected "
                f"{', '.join(DRIVABLE_LAYERS + LANE_LAYERS)}."
            )
        self.polygons  # noqa: B018  # a polygon that crosses itself is refused here

    @cached_property
    def polygons(self) -> Polygons:
        """The polygons, ready to be compared with points."""
        return Polygons(self.rings)

    def mask(self, *layers: str) -> Bools:
        """Return which polygons belong to `layers`: [P]."""
        return np.array([layer in layers for layer in self.layers], bool)

    @cached_property
    def intersections(self) -> Polygons:
        """The polygons of intersections."""
        rings = zip(self.rings, self.layers, strict=True)
        return Polygons([ring for ring, layer in rings if layer == "intersection"])


@dataclass(frozen=True)
class Tracks:
    """Other road users and objects at 10 Hz.

    Args:
        poses: [N, 51, 3] box centres and headings, or [B, N, 51, 3], one future for each proposal.
        sizes: [N, 2], lengths and widths.
        speeds: [N], at the first sample in which the object is seen. The reference decides from
            this one number whether an object stands.
        is_agent: [N], True for vehicles, pedestrians and bicycles, False for cones, barriers,
            signs and other things.
        seen: [N, 51], False in samples without the object; None: always seen.

    Example:
        A car that stands 20 m ahead:

        Tracks(poses=np.tile([20.0, 0.0, 0.0], (1, 51, 1)), sizes=np.array([[4.6, 1.9]]),
            speeds=np.zeros(1), is_agent=np.array([True]))
    """

    poses: Floats
    sizes: Floats
    speeds: Floats
    is_agent: Bools
    seen: Bools | None = None

    def __post_init__(self) -> None:
        shape, count = self.poses.shape, len(self.sizes)
        if len(shape) not in (3, 4) or shape[-3:] != (count, NUM_TRACK_STEPS, 3):
            raise ValueError(
                f"tracks have poses of shape {shape}, expected [{count}, {NUM_TRACK_STEPS}, 3] at "
                "10 Hz, optionally with the proposals as a first axis."
            )
        seen = self.seen_or_all
        if not np.isfinite(self.poses[..., seen, :]).all():
            raise ValueError(
                "a track has a pose that is not finite; mark samples without the object in `seen`."
            )
        if len(self.speeds) != count or len(self.is_agent) != count:
            raise ValueError(
                f"there are {count} tracks, {len(self.speeds)} speeds and {len(self.is_agent)} "
                "kinds, expected as many of each."
            )

    @cached_property
    def seen_or_all(self) -> Bools:
        """Samples that have the object: [N, 51]."""
        if self.seen is None:
            return np.ones((len(self.sizes), NUM_TRACK_STEPS), bool)
        return self.seen

    @staticmethod
    def none() -> "Tracks":
        """Return an empty road."""
        return Tracks(
            poses=np.zeros((0, NUM_TRACK_STEPS, 3)),
            sizes=np.zeros((0, 2)),
            speeds=np.zeros(0),
            is_agent=np.zeros(0, bool),
        )


@dataclass(frozen=True)
class RedLights:
    """Areas of the route's connectors whose light is red.

    Args:
        rings: corners of each area, [k, 2].
        is_red: [R, 41], when it is red.

    Example:
        The connector of the route, red for the first 2 s:

        RedLights(rings=(connector,), is_red=np.arange(41)[None] < 20)
    """

    rings: tuple[Floats, ...] = ()
    is_red: Bools = field(default_factory=lambda: np.zeros((0, NUM_STEPS + 1), bool))

    def __post_init__(self) -> None:
        if self.is_red.shape != (len(self.rings), NUM_STEPS + 1):
            raise ValueError(
                f"is_red has shape {self.is_red.shape}, expected ({len(self.rings)}, "
                f"{NUM_STEPS + 1}): a row for each area."
            )
        self.polygons  # noqa: B018  # a polygon that crosses itself is refused here

    @cached_property
    def polygons(self) -> Polygons:
        """The areas, ready to be compared with boxes."""
        return Polygons(self.rings)


@dataclass(frozen=True)
class Scene:
    """One scene to grade trajectories in.

    Args:
        start: [11], the car's state at 0 s.
        map: polygons around it.
        centre_line: [K, 2] or more columns, the route's centre line, K >= 2.
        tracks: other road users.
        red_lights: areas of red lights.
        reference: [41, 3], the poses of the reference planner's proposal, which progress is
            measured by; None: progress is measured by the graded trajectory alone.
        history: [H, 11], states at 10 Hz before 0 s, oldest first; None: unknown.
        human: [8, 3], the human's waypoints in the ego frame, for the human filter.
        vehicle: the car's sizes.

    Example:
        A start at 8 m/s at the origin; nothing else is known:

        start = np.zeros(11)
        start[VX] = 8.0
        Scene(start, road_map, centre_line=np.array([[-10.0, 0.0], [80.0, 0.0]]), tracks=Tracks.none())
    """

    start: Floats
    map: Map
    centre_line: Floats
    tracks: Tracks
    red_lights: RedLights = field(default_factory=RedLights)
    reference: Floats | None = None
    history: Floats | None = None
    human: Floats | None = None
    vehicle: Vehicle = PACIFICA

    def __post_init__(self) -> None:
        if self.start.shape != (STATE_SIZE,) or not np.isfinite(self.start).all():
            raise ValueError(
                f"the start has shape {self.start.shape}, expected {STATE_SIZE} finite numbers."
            )
        line = self.centre_line
        if line.ndim != 2 or len(line) < 2 or not np.isfinite(line).all():
            raise ValueError(
                f"the centre line has shape {line.shape}, expected at least 2 finite points; a "
                "scene without a route has no progress and cannot be graded."
            )
        for name, wanted in (("reference", (NUM_STEPS + 1, 3)), ("human", (8, 3))):
            given = cast("Floats | None", getattr(self, name))
            if given is not None and (given.shape != wanted or not np.isfinite(given).all()):
                raise ValueError(
                    f"the {name} has shape {given.shape}, expected {wanted} finite numbers."
                )

    @cached_property
    def line(self) -> Floats:
        """The centre line's positions: [K, 2]."""
        return np.ascontiguousarray(self.centre_line[:, :2])
