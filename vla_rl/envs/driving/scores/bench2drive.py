"""Bench2Drive's tables from route records: driving score, success, efficiency, the five abilities.

Formulas: Bench2Drive 7ec25d1 (release 0.0.4), leaderboard/leaderboard/utils/statistics_manager.py,
tools/merge_route_json.py, tools/ability_benchmark.py. `comfort` has the smoothness.

The multi-ability is the success ratio of five driving abilities, and their mean. Its rules differ from
those of the driving score:

- Routes without a record are left out; they do not count as failures.
- The type of a route's first scenario decides, and one type may belong to two abilities.
- A failed route counts as a success of `traffic_signs`, and of no other ability, if it went on for
  8 m behind the entrance of the route's first junction without running a red light or a stop sign.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

import numpy as np

RouteSet = Literal["bench2drive220", "bench2drive_0.0.4_val"]

NUM_ROUTES: Final = 220
"""The divisor of the benchmark, however many routes were driven (merge_route_json.py:36)."""

PENALTIES: Final[dict[str, float]] = {
    "collisions_pedestrian": 0.5,
    "collisions_vehicle": 0.6,
    "collisions_layout": 0.65,
    "red_light": 0.7,
    "stop_infraction": 0.8,
    "scenario_timeouts": 0.7,
    "yield_emergency_vehicle_infractions": 0.7,
}
"""Factor of each event of a kind (statistics_manager.py:21-38)."""

UNPENALISED: Final = "min_speed_infractions"
"""Events that carry no penalty and spare the success; they hold the efficiency."""

FINISHED: Final = ("Completed", "Perfect")
MOST_EFFICIENT: Final = 1000.0
"""Percentages above it are dropped as faults of the measurement."""


@dataclass(frozen=True)
class RouteRecord:
    """The record of one route.

    Args:
        route_id: its number in the route set.
        status: the leaderboard's word, such as Completed, Perfect or Failed - Agent timed out.
        completion: percentage of the route, 0 to 100.
        infractions: number of events of each kind, without those of `min_speed_infractions`.
        outside_route: percentage of the route that was driven outside of its lanes; that of several
            events is what their factors, multiplied, take away.
        speeds: the car's speeds in percent of the traffic's, one for each min-speed event.
        save_name: the leaderboard's name of the drive, and of the folder with its ride.
        composed: the leaderboard's own `score_composed`; None: it is computed from the other fields.

    Example:
        A finished route with one collision; its driving score is 60:

        RouteRecord("1711", "Completed", completion=100.0, infractions={"collisions_vehicle": 1},
            speeds=[84.0, 120.5], save_name="RouteScenario_1711_rep0_Town12_...")
    """

    route_id: str
    status: str
    completion: float
    infractions: Mapping[str, int] = field(default_factory=dict)
    outside_route: float = 0.0
    speeds: Sequence[float] = ()
    save_name: str = ""
    composed: float | None = None

    def __post_init__(self) -> None:
        if not 0.0 <= self.completion <= 100.0:
            raise ValueError(f"completion is {self.completion}, expected 0 to 100 percent.")
        if UNPENALISED in self.infractions:
            raise ValueError(f"{UNPENALISED} is not counted; give their percentages as `speeds`.")

    @property
    def driving_score(self) -> float:
        """The leaderboard's score, or else `recomputed_score`, 0 to 100."""
        return self.recomputed_score if self.composed is None else self.composed

    @property
    def recomputed_score(self) -> float:
        """Completion times the penalties of all events, 0 to 100."""
        factor = 1.0 - self.outside_route / 100.0
        for kind, count in self.infractions.items():
            factor *= PENALTIES.get(kind, 1.0) ** count
        return self.completion * factor

    @property
    def is_success(self) -> bool:
        """Finished without an infraction of any kind (merge_route_json.py:20-28)."""
        # min-speed events are infractions by name alone: they are left out of `infractions`
        unbroken = not any(self.infractions.values()) and self.outside_route == 0.0
        return self.status in FINISHED and unbroken

    @property
    def efficiency(self) -> float | None:
        """Mean speed in percent of the traffic's; None without an event that counts."""
        # the tool drops them, and divides by zero if it has dropped all
        kept = [speed for speed in self.speeds if speed <= MOST_EFFICIENT]
        return float(np.mean(kept)) if kept else None


@dataclass(frozen=True)
class BenchmarkTable:
    """The benchmark's table over one route set.

    Attributes:
        route_set: the set that the routes are of; tables of different sets do not compare.
        num_routes: routes that were driven; the others count as 0.
        driving_score: mean driving score, 0 to 100.
        success_rate: share of routes without any infraction, 0 to 1.
        efficiency: mean over the routes with events; None without any.

    Example:
        BenchmarkTable("bench2drive220", num_routes=220, driving_score=45.9, success_rate=0.164,
            efficiency=140.2)
    """

    route_set: RouteSet
    num_routes: int
    driving_score: float
    success_rate: float
    efficiency: float | None


def make_benchmark_table(
    records: Sequence[RouteRecord], route_set: RouteSet, route_ids: Sequence[str] | None = None
) -> BenchmarkTable:
    """Return the table over `records`, divided by 220 whatever was driven.

    Args:
        route_ids: numbers of the routes of the set; None: not compared.

    Raises: ValueError if a route is driven twice or is not of the set.
    """
    driven = [record.route_id for record in records]
    # the divisor is fixed, so a route that ran twice would count twice
    twice = sorted({one for one in driven if driven.count(one) > 1})
    if twice:
        raise ValueError(f"routes {twice[:8]} are recorded twice, expected each route once.")
    strange = sorted(set(driven) - set(driven if route_ids is None else route_ids))
    if strange:
        raise ValueError(
            f"routes {strange[:8]} are not of {route_set}; name the set that was driven."
        )
    speeds = [record.efficiency for record in records if record.efficiency is not None]
    return BenchmarkTable(
        route_set=route_set,
        num_routes=len(records),
        driving_score=sum(record.driving_score for record in records) / NUM_ROUTES,
        success_rate=sum(record.is_success for record in records) / NUM_ROUTES,
        efficiency=float(np.mean(speeds)) if speeds else None,
    )


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

SCENARIO_TYPES: Final[dict[str, frozenset[str]]] = {
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
SIGN_INFRACTIONS: Final = ("red_light", "stop_infraction")
"""Infractions after which a failed route does not count as a success of traffic signs."""

JUNCTION_MARGIN: Final = 8
"""Points of the route, 1 m apart, that have to be driven behind the entrance of a junction."""


@dataclass(frozen=True)
class FirstJunction:
    """The position of a route's first junction on CARLA's map.

    Args:
        point: number of the route's first point in a junction, counted from 1; None without any.
        num_points: points of the route, about 1 m apart, as CARLA's planner interpolates it.

    Example:
        FirstJunction(point=131, num_points=412)
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
    """Routes of one ability that were driven, and how many of them count as a success.

    Example:
        Ability(num_successes=12, num_routes=45), whose success ratio is 0.27
    """

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

    Example:
        Two routes of the set were not driven, so the mean is that of the others:

        AbilityTable(abilities={"merging": ..., "give_way": ...}, mean=0.41, left_out=["2091", "3540"])
    """

    abilities: Mapping[str, Ability]
    mean: float | None
    left_out: Sequence[str]


def make_ability_table(
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
    counts = {name: [0, 0] for name in SCENARIO_TYPES}
    for route_id, record in driven.items():
        for name, of_ability in SCENARIO_TYPES.items():
            if types[route_id] not in of_ability:
                continue
            is_success = record.is_success
            if name == TRAFFIC_SIGNS and not is_success:
                is_success = obeyed_signs(record, junctions[route_id])
            counts[name][0] += is_success
            counts[name][1] += 1
    abilities = {name: Ability(*both) for name, both in counts.items()}
    # the benchmark's tool divides by zero for an ability of which no route was driven
    ratios = [each.success_ratio for each in abilities.values()]
    known = [ratio for ratio in ratios if ratio is not None]
    return AbilityTable(
        abilities=abilities,
        mean=sum(known) / len(ratios) if len(known) == len(ratios) else None,
        left_out=[route_id for route_id in types if route_id not in driven],
    )


def obeyed_signs(record: RouteRecord, junction: FirstJunction) -> bool:
    """Return if a failed route passed its first junction without breaking a traffic sign.

    Raises: ValueError if the route has no junction, as the benchmark's tool does.
    """
    if junction.point is None:
        raise ValueError(
            f"route {record.route_id} has no junction on CARLA's map, expected one on a route of "
            "traffic signs; make the file of first junctions with the maps that were driven."
        )
    # the tool asks no more than this: a crash behind the junction is a success of traffic signs
    passed = record.completion / 100.0 > (junction.point + JUNCTION_MARGIN) / junction.num_points
    return passed and not any(record.infractions.get(kind, 0) for kind in SIGN_INFRACTIONS)


def require_same_routes(types: Mapping[str, str], junctions: Mapping[str, FirstJunction]) -> None:
    """Check that routes and first junctions are of one set. Raises: ValueError naming routes."""
    lacking = sorted(set(types) - set(junctions))
    strange = sorted(set(junctions) - set(types))
    if lacking or strange:
        raise ValueError(
            f"the first junctions lack routes {lacking[:8]} and have routes {strange[:8]} that the "
            "routes file does not have, expected the same routes; make them from this routes file."
        )
