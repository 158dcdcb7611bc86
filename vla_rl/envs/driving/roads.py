"""Roads of one scene: polygons, the car's route, the paths of others, signals."""

from dataclasses import dataclass, field
from typing import Final

from vla_rl.envs.driving.paths import Floats, shifted, strip
from vla_rl.envs.driving.scores.scene import Layer, Map

LANE_WIDTH: Final = 3.5
COMMANDS: Final = ("left", "straight", "right", "unknown")
"""NavSim's driving commands, in the order of its one-hot vector."""


@dataclass(frozen=True)
class TrafficPath:
    """A path that other cars drive.

    Args:
        points: [K, 2], a point every metre.
        stop: metres along it to the stop line, or None.
        crosses: the path crosses the car's, so its light shows the other phase.
    """

    points: Floats
    stop: float | None = None
    crosses: bool = False


@dataclass
class Roads:
    """Roads around the car, which starts near the origin and looks along x.

    Attributes:
        rings, layers, on_route: the polygons of the map.
        route: [K, 2], a point every metre, from at least 10 m behind the car.
        stop: metres along the route to a stop line with a signal, or None.
        signal_area: the connector that is red while the signal is, or None.
        paths: paths of others; the first one is the route.
        crossings: pairs of points that walkers cross between.
        solid, dashed: lines to draw.
        command: one of COMMANDS.
        speed_limit: metres per second.
    """

    command: str
    speed_limit: float
    route: Floats
    rings: list[Floats] = field(default_factory=list)
    layers: list[Layer] = field(default_factory=list)
    on_route: list[bool] = field(default_factory=list)
    stop: float | None = None
    signal_area: Floats | None = None
    paths: list[TrafficPath] = field(default_factory=list)
    crossings: list[tuple[Floats, Floats]] = field(default_factory=list)
    solid: list[Floats] = field(default_factory=list)
    dashed: list[Floats] = field(default_factory=list)

    def add(self, ring: Floats, layer: Layer, on_route: bool = False) -> None:
        """Add one polygon."""
        self.rings.append(ring)
        self.layers.append(layer)
        self.on_route.append(on_route)

    def add_lane(
        self, path: Floats, on_route: bool, layer: Layer = "lane", width: float = LANE_WIDTH
    ) -> None:
        """Add a lane around a path, and the road under it."""
        ring = strip(path, width / 2)
        self.add(ring, layer, on_route)
        self.add(strip(path, width / 2 + 0.15), "roadblock")

    def draw_edges(self, path: Floats, left_dashed: bool, right_dashed: bool) -> None:
        """Note the lines beside a lane."""
        for side, dashed in ((LANE_WIDTH / 2, left_dashed), (-LANE_WIDTH / 2, right_dashed)):
            (self.dashed if dashed else self.solid).append(shifted(path, side))

    def as_map(self) -> Map:
        """Return the polygons as the scores read them."""
        return Map(tuple(self.rings), tuple(self.layers), tuple(self.on_route))
