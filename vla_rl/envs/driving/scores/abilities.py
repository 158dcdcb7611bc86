"""Bench2Drive's multi-ability: the success ratio of five driving abilities, and their mean.

Rules: Bench2Drive 7ec25d1, tools/ability_benchmark.py. They differ from those of the driving score:

- Routes without a record are left out; they do not count as failures.
- The type of a route's first scenario decides, and one type may belong to two abilities.
- A failed route counts as a success of `traffic_signs`, and of no other ability, if it went on for
  8 m behind the entrance of the route's first junction without running a red light or a stop sign.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from vla_rl.envs.driving.scores.bench2drive import RouteRecord

_CROSSED_WHILE_BRAKING: Final = (
    "BlockedIntersection",
    "OppositeVehicleRunningRedLight",
    "OppositeVehicleTakingPriority",
    "PedestrianCrossing",
    "VehicleTurningRoute",
    "VehicleTurningRoutePedestrian",
)
_CROSSED_WHILE_MERGING: Final = (
    "CrossingBicycleFlow",
    "EnterActorFlow",
    "NonSignalizedJunctionLeftTurn",
    "NonSignalizedJunctionLeftTurnEnterFlow",
    "NonSignalizedJunctionRightTurn",
    "SignalizedJunctionLeftTurn",
    "SignalizedJunctionLeftTurnEnterFlow",
    "SignalizedJunctionRightTurn",
)

TYPES_OF: Final[dict[str, frozenset[str]]] = {
    "overtaking": frozenset(
        (
            "Accident",
            "AccidentTwoWays",
            "ConstructionObstacle",
            "ConstructionObstacleTwoWays",
            "HazardAtSideLane",
            "HazardAtSideLaneTwoWays",
            "ParkedObstacle",
            "ParkedObstacleTwoWays",
            "VehicleOpensDoorTwoWays",
        )
    ),
    "merging": frozenset(
        (
            *_CROSSED_WHILE_MERGING,
            "HighwayCutIn",
            "HighwayExit",
            "InterurbanActorFlow",
            "InterurbanAdvancedActorFlow",
            "MergerIntoSlowTraffic",
            "MergerIntoSlowTrafficV2",
            "ParkingExit",
            "SequentialLaneChange",
        )
    ),
    "emergency_brake": frozenset(
        (
            *_CROSSED_WHILE_BRAKING,
            "ControlLoss",
            "DynamicObjectCrossing",
            "HardBreakRoute",
            "ParkingCrossingPedestrian",
            "ParkingCutIn",
            "StaticCutIn",
        )
    ),
    "give_way": frozenset(("InvadingTurn", "YieldToEmergencyVehicle")),
    "traffic_signs": frozenset(
        (
            *_CROSSED_WHILE_BRAKING,
            *_CROSSED_WHILE_MERGING,
            "T_Junction",
            "VanillaNonSignalizedTurn",
            "VanillaNonSignalizedTurnEncounterStopsign",
            "VanillaSignalizedTurnEncounterGreenLight",
            "VanillaSignalizedTurnEncounterRedLight",
        )
    ),
}
"""Scenario types of each ability. The benchmark lists 24 for traffic signs; five of them are
repeated, which changes nothing."""

TRAFFIC_SIGNS: Final = "traffic_signs"
SIGNS: Final = ("red_light", "stop_infraction")
"""Infractions after which a failed route does not count as a success of traffic signs."""

MARGIN: Final = 8
"""Points of the route, 1 m apart, that have to be driven behind the entrance of a junction."""


@dataclass(frozen=True)
class FirstJunction:
    """The place of a route's first junction on CARLA's map.

    Args:
        point: number of the route's first point in a junction, counted from 1; None without any.
        num_points: points of the route, about 1 m apart, as CARLA's planner interpolates it.
    """

    point: int | None
    num_points: int

    def __post_init__(self) -> None:
        if not 1 <= (self.point or 1) <= self.num_points:
            raise ValueError(
                f"the junction is at point {self.point} of {self.num_points}, expected 1 to "
                "the number of points."
            )


@dataclass(frozen=True)
class Ability:
    """Routes of one ability that were driven, and how many of them count as a success."""

    num_successes: int
    num_routes: int

    @property
    def success_ratio(self) -> float | None:
        """Share of successes, 0 to 1; None if no route of it was driven."""
        return self.num_successes / self.num_routes if self.num_routes else None


@dataclass(frozen=True)
class AbilityTable:
    """The five abilities over one route set.

    Attributes:
        abilities: by name, in the benchmark's order.
        mean: mean of the five ratios, 0 to 1; None if one of them is missing.
        left_out: ids of the routes of the set that were not driven.
    """

    abilities: Mapping[str, Ability]
    mean: float | None
    left_out: Sequence[str]


def abilities_of(
    records: Sequence[RouteRecord],
    types: Mapping[str, str],
    junctions: Mapping[str, FirstJunction],
) -> AbilityTable:
    """Return the success ratio of each ability over the routes that were driven.

    Args:
        types: type of the first scenario of each route of the set, by the route's id.
        junctions: first junction of each route of the set, by the route's id.

    Raises: ValueError if a record or a junction is of another set, if a route is driven twice or
        lacks its junction, or if a failed route of traffic signs has none.
    """
    require_same_routes(types, junctions)
    driven = {record.route_id: record for record in records}
    if len(driven) < len(records):
        raise ValueError("a route is recorded twice, expected each route once.")
    if strange := sorted(set(driven) - set(types)):
        raise ValueError(f"routes {strange[:8]} are not in the routes file; give the one driven.")
    counts = {name: [0, 0] for name in TYPES_OF}
    for route_id, record in driven.items():
        for name, of_ability in TYPES_OF.items():
            if types[route_id] not in of_ability:
                continue
            is_success = record.is_success
            if name == TRAFFIC_SIGNS and not is_success:
                is_success = obeyed_the_signs(record, junctions[route_id])
            counts[name][0] += is_success
            counts[name][1] += 1
    abilities = {name: Ability(*both) for name, both in counts.items()}
    ratios = [each.success_ratio for each in abilities.values()]
    known = [ratio for ratio in ratios if ratio is not None]
    return AbilityTable(
        abilities=abilities,
        mean=sum(known) / len(ratios) if len(known) == len(ratios) else None,
        left_out=[route_id for route_id in types if route_id not in driven],
    )


def obeyed_the_signs(record: RouteRecord, junction: FirstJunction) -> bool:
    """Return if a failed route passed its first junction without breaking a traffic sign.

    Raises: ValueError if the route has no junction, as the benchmark's tool does.
    """
    if junction.point is None:
        raise ValueError(
            f"route {record.route_id} has no junction on CARLA's map, expected one on a route of "
            "traffic signs; make the file of first junctions with the maps that were driven."
        )
    passed = record.completion / 100.0 > (junction.point + MARGIN) / junction.num_points
    return passed and not any(record.infractions.get(kind, 0) for kind in SIGNS)


def require_same_routes(types: Mapping[str, str], junctions: Mapping[str, FirstJunction]) -> None:
    """Check that routes and first junctions are of one set. Raises: ValueError naming routes."""
    lacking = sorted(set(types) - set(junctions))
    strange = sorted(set(junctions) - set(types))
    if lacking or strange:
        raise ValueError(
            f"the first junctions lack routes {lacking[:8]} and have routes {strange[:8]} that the "
            "routes file does not have, expected the same routes; make them from this routes file."
        )
