"""Routes and their records drawn from a seed, for golden numbers of Bench2Drive's multi-ability."""

import numpy as np

from vla_rl.envs.driving.scores.bench2drive import SCENARIO_TYPES, FirstJunction, RouteRecord

KINDS = ("red_light", "stop_infraction", "collisions_vehicle", "scenario_timeouts")
ALL_TYPES = sorted(set().union(*SCENARIO_TYPES.values()))


def draw_routes(
    seed: int,
) -> tuple[dict[str, str], dict[str, FirstJunction], list[RouteRecord]]:
    """Types, first junctions and records of 60 routes, a fifth of which were not driven.

    The first routes have one type of each ability and were driven: the tool divides by their number.
    """
    rng = np.random.default_rng((31, seed))
    types, junctions, records = {}, {}, []
    surely = [min(of_ability) for of_ability in SCENARIO_TYPES.values()]
    for number in range(60):
        route_id = str(1700 + 3 * number)
        drawn = str(rng.choice(ALL_TYPES))
        types[route_id] = surely[number] if number < len(surely) else drawn
        num_points = int(rng.integers(40, 200))
        point = int(rng.integers(1, num_points - 10))
        junctions[route_id] = FirstJunction(point, num_points)
        # a third of the failures ends where the rule decides
        near = 100.0 * (point + 8 + int(rng.integers(-1, 2))) / num_points
        completion = min(near if rng.random() < 0.33 else round(rng.uniform(0, 100), 2), 100.0)
        infractions = {kind: int(rng.random() < 0.2) for kind in KINDS}
        done = rng.random() < 0.5
        status = str(rng.choice(["Completed", "Perfect"])) if done else "Failed - Agent timed out"
        was_driven = number < len(surely) or rng.random() < 0.8
        if was_driven:
            at = 100.0 if done else completion
            records.append(RouteRecord(route_id, status, at, infractions))
    return types, junctions, records
