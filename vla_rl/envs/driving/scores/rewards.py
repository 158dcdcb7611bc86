"""Rewards made of sub-scores: `total`, one sub-score, or a weighted sum of several.

weights = reward_weights("ego_progress=0.5,lane_keeping=0.5", "epdms_v2")
reward = weighted_reward(weights, {"total": 0.8, "ego_progress": 0.9, ...})
"""

from collections.abc import Mapping

from vla_rl.envs.driving.scores.pdm import MULTIPLIERS, WEIGHTS, Version


def reward_weights(text: str, version: Version) -> dict[str, float]:
    """Return the weight of each part of a reward such as "total" or "total=1,lane_keeping=0.5".

    A name without a weight has weight 1.

    Raises: ValueError for an unknown name, or a weight that is no number.
    """
    known = ("total", *MULTIPLIERS[version], *WEIGHTS[version])
    weights: dict[str, float] = {}
    for part in text.split(","):
        name, equals, weight = (piece.strip() for piece in part.partition("="))
        if name not in known:
            raise ValueError(f"reward names {name!r}, expected one of {', '.join(known)}.")
        if name in weights:
            raise ValueError(f"reward names {name!r} twice; give it one weight.")
        try:
            weights[name] = float(weight) if equals else 1.0
        except ValueError:
            raise ValueError(f"the weight of {name} is {weight!r}, expected a number.") from None
    return weights


def weighted_reward(weights: Mapping[str, float], score: Mapping[str, float]) -> float:
    """Return the sum of the weighted parts of a score."""
    return sum(weight * score[name] for name, weight in weights.items())
